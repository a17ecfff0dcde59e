"""What is asked of a plan: :class:`Request`, whose wishes go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs

from qsync_core.errors import PlanError
from qsync_planner.allocator.baselines import MAX_TOLERANCE, UniformStart
from qsync_planner.allocator.communication import AS_ASKED, Fixed
from qsync_planner.allocator.problem import SearchState
from qsync_planner.allocator.solution import Solution

SOLVERS = ("auto", "exact", "greedy", "uniform", "full", "dynamic-batch")
"""The first three plan; the others are the baselines they are compared with."""

OBJECTIVES = ("omega", "memory", "time")
"""What a plan may be the best in."""

BATCHES = ("equal", "free")
"""Local batches: those that were traced, or such that a plan may move samples from inference to training ranks."""

PLANNERS = ("auto", "exact", "greedy")
"""Solvers that need a sensitivity."""


class Solver(Protocol):
    """A way to look for a plan that qsync-planner does not have, as :attr:`Request.solver` takes one.

    Attributes:
        name: as plans have it.
    """

    name: str

    def __call__(self, state: SearchState, starts: Mapping[str, UniformStart], limit_ns: int) -> Solution:
        """Find a plan.

        Args:
            state: at uniform precision, which keeps every limit; left at the plan.
            starts: uniform precision, by inference group.
            limit_ns: of the step.
        """
        ...


@attrs.frozen
class Request:
    """How a plan is looked for.

    Attributes:
        solver: one of :data:`SOLVERS`, or a :class:`Solver`.
        objective: one of :data:`OBJECTIVES`; the other two are limits.  ``memory`` takes the time limit of uniform precision,
            ``time`` takes ``omega_limit``; among the plans that are best so, the one of least Σ Ω.
        omega_limit: the largest Σ Ω over all inference devices, for ``time``; None for any.
        tolerance: share by which the plan may be slower than uniform precision; 0 means not at all.
        batch: one of :data:`BATCHES`.  ``free`` never gives a plan of more Σ Ω than ``equal``, and keeps the same time limit; the Ω
            of a rank counts its share of the traced batch (docs/decisions/free-batches.md).
        keep: names of modules that stay at the base precision (:func:`~qsync_planner.allocator.keep.kept_operators`).
        seconds: wall-clock time after which ``exact`` and ``auto`` return the best plan found; None lets ``exact`` end with a proof
            and ``auto`` with an amount of work that does not depend on the machine.
        communication: attributes of :class:`~qsync_core.ir.communication.CommunicationSettings` that are decided already.
        communication_said: by whom, as the plan's reason has it behind their names.

    Raises:
        PlanError: naming what does not go together, before anything is measured for it.
    """

    solver: str | Solver = "auto"
    objective: str = "omega"
    omega_limit: float | None = None
    tolerance: float = 0.0
    batch: str = "equal"
    keep: tuple[str, ...] = ()
    seconds: float | None = None
    communication: Fixed = attrs.field(factory=dict)
    communication_said: str = AS_ASKED

    def __attrs_post_init__(self) -> None:
        """Refuse what does not go together."""
        solver = self.name
        if isinstance(self.solver, str) and solver not in SOLVERS:
            raise PlanError(f"there is no solver {solver!r}; choose one of {', '.join(SOLVERS)}")
        if not 0 <= self.tolerance <= MAX_TOLERANCE:
            raise PlanError(
                f"the tolerance must be a finite number ≥ 0 and at most {MAX_TOLERANCE:g} (0.05 allows 5% more time), got "
                f"{self.tolerance!r}"
            )
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise PlanError(f"the time for solving must be a finite number of seconds above 0, got {self.seconds!r}")
        if self.seconds is not None and solver not in ("auto", "exact"):
            raise PlanError(f"only the solvers auto and exact can be given a time, not {solver}")
        self._check_objective()
        self._check_batch()

    def _check_objective(self) -> None:
        if self.objective not in OBJECTIVES:
            raise PlanError(f"there is no objective {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if self.objective != "omega" and self.name not in ("auto", "exact"):
            raise PlanError(f"only the solvers auto and exact can minimise {self.objective}, not {self.name}")
        if self.omega_limit is not None and self.objective != "time":
            raise PlanError(f"a limit of Σ Ω goes with the objective time, not with {self.objective}")
        if self.omega_limit is not None and not 0 <= self.omega_limit < float("inf"):
            raise PlanError(f"the limit of Σ Ω must be a finite number ≥ 0, got {self.omega_limit!r}")

    def _check_batch(self) -> None:
        if self.batch not in BATCHES:
            raise PlanError(f"local batches are {' or '.join(BATCHES)}, got {self.batch!r}")
        if self.batch == "equal":
            return
        if not self.needs_sensitivity:
            raise PlanError(f"only the solvers {', '.join(PLANNERS)} can choose local batches too, not {self.name}")
        if self.objective == "memory":
            raise PlanError(
                "free local batches go with the objectives omega and time: plans are looked for under several splits of the batch"
            )

    @property
    def name(self) -> str:
        """The solver's name."""
        return self.solver if isinstance(self.solver, str) else self.solver.name

    @property
    def needs_sensitivity(self) -> bool:
        """Whether the solver plans; baselines do without."""
        return self.name in PLANNERS or not isinstance(self.solver, str)

    @property
    def chooses_chains(self) -> bool:
        """Whether the solver chooses which chains are fused, as those for plans with equal local batches do; others fuse none."""
        return self.solver in PLANNERS and self.batch == "equal"
