"""Which parts of a variant make which noise: variants that differ elsewhere need not be observed twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import gradient_precisions
from qsync_core.ir.variant import Variant

Part = tuple[object, ...]
"""A part of a variant that one kind of noise depends on; equal parts make equal noise."""


def operands(variant: Variant) -> Part | None:
    """What the rounding of the two operands depends on; None for float32 operands."""
    v = variant
    if v.compute is Precision.FLOAT32:
        return None
    if not v.compute.needs_scale:
        return ("operands", v.compute)
    return ("operands", v.compute, v.x_granularity, v.w_granularity, v.rounding, v.symmetric)


def output(variant: Variant) -> Part | None:
    """What the rounding of the output depends on; None for a float32 output."""
    return None if variant.output is Precision.FLOAT32 else ("output", variant.output)


def gradients(variant: Variant) -> Part | None:
    """What the rounding of gradients depends on; None where all are float32."""
    copies = gradient_precisions(variant)
    if copies == (Precision.FLOAT32,):
        return None
    rounding = variant.rounding if any(copy.needs_scale for copy in copies) else None
    return ("gradients", variant.grad_input, variant.grad_weight, rounding)


def observed_sources(
    observations: Observations, collector: str, part_of_term: Mapping[str, Callable[[Variant], Part | None]]
) -> dict[tuple[OpId, Part], Variant]:
    """For every operator and part that a collector's terms were written for, an observed variant that has it.

    Args:
        observations: as collected.
        collector: whose series.
        part_of_term: by the terms to look for, which part each depends on.
    """
    found: dict[tuple[OpId, Part], Variant] = {}
    for series in observations.series:
        if series.collector != collector or series.op_id is None or series.variant is None or series.term not in part_of_term:
            continue
        part = part_of_term[series.term](series.variant)
        if part is not None:
            found.setdefault((series.op_id, part), series.variant)
    return found
