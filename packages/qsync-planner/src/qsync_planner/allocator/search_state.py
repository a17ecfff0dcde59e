"""The plan under search: rungs per unit and group, with transactional trials through the replayer.

A trial changes some units of one group and predicts; it is then either accepted, or rejected without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qsync_planner.allocator.problem import Problem
from qsync_planner.replayer.replay import Prediction, Replayer


class SearchState:
    """Current rungs and their prediction; begins at the base precision.  At most one trial is open at any time."""

    def __init__(self, problem: Problem, replayer: Replayer) -> None:
        self.problem = problem
        self.replayer = replayer
        self.trials = 0
        self._rungs = {group.name: [unit.top for unit in group.units] for group in problem.groups}
        self.prediction = replayer.start({})
        self._open: tuple[str, dict[int, int], Prediction] | None = None

    def rungs(self, group: str) -> tuple[int, ...]:
        """The accepted rung of every unit of a group."""
        return tuple(self._rungs[group])

    def rung(self, group: str, index: int) -> int:
        """The accepted rung of one unit."""
        return self._rungs[group][index]

    def all_rungs(self) -> dict[str, tuple[int, ...]]:
        """The accepted rungs of all groups."""
        return {name: tuple(rungs) for name, rungs in self._rungs.items()}

    def try_moves(self, group: str, moves: Mapping[int, int]) -> Prediction:
        """Open a trial: unit index → rung index.  Returns the prediction with those moves made."""
        assert self._open is None, "a trial is still open"
        units = self.problem.by_name[group].units
        changed = {index: rung for index, rung in moves.items() if self._rungs[group][index] != rung}
        variants = {op_id: units[index].rungs[rung] for index, rung in changed.items() for op_id in units[index].operators}
        prediction = self.replayer.trial(group, variants)
        self._open = (group, changed, prediction)
        self.trials += 1
        return prediction

    def accept(self) -> None:
        """Keep the open trial."""
        assert self._open is not None, "no trial is open"
        group, moves, prediction = self._open
        self.replayer.commit()
        for index, rung in moves.items():
            self._rungs[group][index] = rung
        self.prediction = prediction
        self._open = None

    def reject(self) -> None:
        """Drop the open trial; nothing of it remains."""
        assert self._open is not None, "no trial is open"
        self.replayer.rollback()
        self._open = None

    def move_to(self, group: str, rungs: Sequence[int]) -> Prediction:
        """Set every unit of a group and keep it."""
        prediction = self.try_moves(group, dict(enumerate(rungs)))
        self.accept()
        return prediction

    def peak_bytes(self, group: str) -> int:
        """Predicted peak of the accepted plan."""
        return self.prediction.groups[group].peak_bytes
