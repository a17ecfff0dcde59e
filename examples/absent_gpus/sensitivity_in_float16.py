"""A sensitivity observed in bfloat16, for chips that have float16 in its place.

    python sensitivity_in_float16.py observed.qsync sensitivity.qsync

float16 keeps three more bits, so its rounding noise has a 64th of the variance, and Ω goes with the variance.  An 8-bit rung keeps
its Ω: only its gradients change their format, and they are rounded less.  Observe your own jobs with the ladder of the chip.
"""

import sys

import attrs

from qsync_core.artifacts.files import load, save
from qsync_core.ir.precision import Precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant

BFLOAT16, FLOAT16 = Precision.BFLOAT16, Precision.FLOAT16
FIELDS = ("compute", "output", "saved", "grad_input", "grad_weight")


def in_float16(by_variant: dict[Variant, float]) -> dict[Variant, float]:
    """Ω, or a part of it, by the variants that take the place of those in bfloat16."""
    found = {}
    for variant, value in by_variant.items():
        formats = {name: FLOAT16 if getattr(variant, name) is BFLOAT16 else getattr(variant, name) for name in FIELDS}
        found[attrs.evolve(variant, **formats)] = value / 64 if variant.compute is BFLOAT16 else value
    return found


if __name__ == "__main__":
    observed = load(sys.argv[1], Sensitivity)
    omega, flips = ({name: in_float16(values) for name, values in part.items()} for part in (observed.omega, observed.flips))
    note = "Ω in float16 is a 64th of what was observed in bfloat16"
    save(attrs.evolve(observed, omega=omega, flips=flips, notes=(*observed.notes, note)), sys.argv[2])
