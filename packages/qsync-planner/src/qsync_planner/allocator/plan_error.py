"""What a whole plan does to the gradients, from what its operators do one by one.

The smooth parts of Ω add up.  Masks that flip are shared: noise flips a mask with a probability that goes with the noise's
standard deviation, and the noises of several operators at one mask add in squares.  Did all operators reach the same masks, their
parts would add in squares too; did no two reach the same one, they would add up.  The exponent is between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import GroupPlan, Role
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant

FLIP_EXPONENT = 1.5
"""Between 1, no shared masks, and 2, all masks shared; checked on whole plans (docs/decisions/omega-of-whole-plans.md)."""


def plan_error(sensitivity: Sensitivity, variants: Mapping[OpId, Variant]) -> float:
    """E‖Δ∂L/∂θ‖² of one device on which operators run in these variants together: Σ (Ω − B) + (Σ B^p)^(1/p), B the part of flips.

    Args:
        sensitivity: Ω and B.
        variants: by operator; what the sensitivity does not rate counts 0, as the base precision does.
    """
    smooth, powers = 0.0, 0.0
    for op_id, variant in variants.items():
        whole = sensitivity.omega.get(op_id, {}).get(variant, 0.0)
        part = sensitivity.flips.get(op_id, {}).get(variant, 0.0)
        smooth += whole - part
        powers += part**FLIP_EXPONENT
    return smooth + float(powers ** (1 / FLIP_EXPONENT))


def error_notes(sensitivity: Sensitivity | None, groups: Iterable[GroupPlan]) -> tuple[str, ...]:
    """A sentence for every inference group whose parts of Ω do not simply add up."""
    notes = []
    for group in groups:
        if sensitivity is None or group.role is not Role.INFER:
            continue
        variants = {op_id: assignment.variant for op_id, assignment in group.assignments.items()}
        total = sum(sensitivity.omega.get(op_id, {}).get(variant, 0.0) for op_id, variant in variants.items())
        together = plan_error(sensitivity, variants)
        if together < total * (1 - 1e-9):
            notes.append(
                f"Ω of group {group.group} as a whole is about {together:.3g} a device, {together / total:.0%} of its Σ Ω "
                f"{total:.3g}: operators share the masks that flip"
            )
    return tuple(notes)
