"""The Sensitivity: Ω of each operator in each variant, with the name of the indicator that made it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import attrs

from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant


@attrs.frozen
class Sensitivity:
    """Ω_o(b): estimated extra mean squared error of all weight gradients caused by running o in variant b.

    See docs/design/indicator.md#omega.

    Attributes:
        model, dag_digest: which PrecisionDag it belongs to.
        observations_digest: what it was computed from (empty for indicators that need none).
        omega: Ω per operator and variant; finite and not negative.  An operator's base precision may be absent: it is 0.
        notes: what a reader must know (a fallback taken, how values were averaged).
        flips: the part of Ω that comes from masks that flip (ReLU, max pooling), likewise; absent is 0.  Operators share those
            masks, so that together these parts are less than their sum (docs/design/indicator.md#whole-plans).
        copies: what Ω gains where an operator reads the copy that a fused chain with a residual writes, likewise; absent is 0
            (docs/design/indicator.md#copies-behind-a-shortcut).
        errors: the standard error of Ω, likewise, of how updates differ; absent where it is not known.
        masks: what flips of all masks behind an operator would do to the gradients under noise as large as what they read; absent
            where it shares no masks.  An operator with more reaches all masks that one with less does.
        shifts: how the fixed error of a stored weight moves the gradients, along sampled directions and with signs; the sum of the
            squares is its part of Ω, and those of operators add up before they are squared
            (docs/design/indicator.md#stored-weights).
    """

    model: str
    dag_digest: str
    observations_digest: str
    indicator: str
    omega: Mapping[OpId, Mapping[Variant, float]]
    notes: tuple[str, ...] = ()
    flips: Mapping[OpId, Mapping[Variant, float]] = attrs.field(factory=dict)
    copies: Mapping[OpId, Mapping[Variant, float]] = attrs.field(factory=dict)
    errors: Mapping[OpId, Mapping[Variant, float]] = attrs.field(factory=dict)
    masks: Mapping[OpId, float] = attrs.field(factory=dict)
    shifts: Mapping[OpId, Mapping[Variant, tuple[float, ...]]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for op_id, by_variant in itertools.chain(self.omega.items(), self.copies.items(), self.errors.items()):
            for variant, value in by_variant.items():
                if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                    raise ValueError(
                        f"Ω of {op_id} at {variant.label} must be a finite number ≥ 0, got {value!r}; "
                        "the statistics behind it contain NaN, infinite or negative values"
                    )
        if len(counts := {len(shift) for by_variant in self.shifts.values() for shift in by_variant.values()}) > 1:
            raise ValueError(f"shifts of all operators are along the same directions, but they are {sorted(counts)} in number")
        for op_id, shifts in self.shifts.items():
            for variant, shift in shifts.items():
                if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in shift):
                    raise ValueError(f"shifts of {op_id} at {variant.label} must be finite numbers, got {shift[:3]!r}")
        for op_id, weight in self.masks.items():
            if not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight <= 0:
                raise ValueError(f"the weight of the masks behind {op_id} must be a finite number above 0, got {weight!r}")
        for op_id, by_variant in self.flips.items():
            for variant, part in by_variant.items():
                whole = self.omega.get(op_id, {}).get(variant, 0.0)
                if not isinstance(part, (int, float)) or not 0 <= part <= whole:
                    raise ValueError(
                        f"the part of Ω of {op_id} at {variant.label} that comes from flipping masks must be from 0 to Ω itself, "
                        f"{whole!r}; got {part!r}"
                    )
