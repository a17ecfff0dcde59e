"""``random``: the paper's random scheme, the baseline that an indicator must beat.

"The largest indicator is randomly generated for the lowest precision of each operator and is halved as precision increases."
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.indicators.interface import Omega

_LEVELS = (Precision.INT8, Precision.FLOAT8_E4M3FN, Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32)


def _order(variant: Variant) -> tuple[int, int, str]:
    """Return the key that sorts variants from the lowest precision up, without ties, so that equal variants get equal numbers."""
    return (_LEVELS.index(variant.compute), _LEVELS.index(variant.output), str(variant))


class RandomScheme:
    """Uniform numbers in [0, 1) per operator, halved from rung to rung; 0 for plain float32.  The seed makes them reproducible."""

    name = "random"
    collectors: tuple[str, ...] = ()
    summary = "uniform random numbers, halved per rung (the paper's baseline)"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator; see :meth:`Indicator.omega`."""
        full = Variant.plain(Precision.FLOAT32)
        rungs = sorted(variants, key=_order)
        return {
            operator.op_id: {
                variant: 0.0 if variant == full else self._draw(str(operator.op_id)) / 2**rung for rung, variant in enumerate(rungs)
            }
            for operator in dag.adjustable
        }

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """The seed."""
        return (f"random numbers from seed {self.seed}",)

    def _draw(self, op: str) -> float:
        # Seeded per operator, so that an operator's number does not depend on which others the model has.
        return random.Random(f"{self.seed} {op}").random()
