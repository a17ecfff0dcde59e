"""The period of a data-flow graph, by running one step after the other."""

from __future__ import annotations

from fractions import Fraction

from reference_simulator import WINDOW

from qsync_core.ir.dfg import GlobalDfg
from qsync_planner.replayer.simulator import Step


def stepped_period(dfg: GlobalDfg, warm_up: int = 40) -> Fraction:
    """Return the period of the resource that becomes free latest, step by step, over as many steps as the reference takes."""
    step = Step(dfg)
    states = [[0] * step.resources]
    for _ in range(warm_up + WINDOW):
        states.append(step.run(states[-1]))
    last, before = states[-1], states[-1 - WINDOW]
    return max(Fraction(now - then, WINDOW) for now, then in zip(last, before, strict=True))
