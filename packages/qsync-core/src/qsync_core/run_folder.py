"""The run folder: what ``qsync prepare`` leaves for training, and for the next ``qsync prepare`` (docs/run-folder.md)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import attrs

from qsync_core.artifacts.files import load
from qsync_core.cluster_file import read_cluster
from qsync_core.errors import PlanError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.plan import PrecisionPlan

_BETWEEN = "+"
"""Joins group names in a file's name; no group's name has it."""


@attrs.frozen
class RunFolder:
    """Names of the files in a run folder; none of them need exist.

    A plan is kept for every set of groups that may be left to train, because groups come and go.
    """

    path: Path = attrs.field(converter=Path)

    @property
    def cluster(self) -> Path:
        """The groups of the job, as a cluster file that a person can read and correct."""
        return self.path / "cluster.toml"

    @property
    def dag(self) -> Path:
        """The job's graph."""
        return self.path / "job.dag.qsync"

    @property
    def observations(self) -> Path:
        """What indicators are made from."""
        return self.path / "job.observations.qsync"

    @property
    def sensitivity(self) -> Path:
        """Ω by operator and precision."""
        return self.path / "job.sensitivity.qsync"

    @property
    def report(self) -> Path:
        """The page that shows all of it."""
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        """The predicted and the measured step, for Perfetto."""
        return self.path / "report.perfetto.json"

    @property
    def start(self) -> Path:
        """What to type to train, as the report shows it: sentences, and indented the lines for a shell."""
        return self.path / "start.txt"

    @property
    def ledger(self) -> Path:
        """What is finished, and from what it was made: by which ``qsync prepare`` continues."""
        return self.path / ".prepare" / "ledger.json"

    def profile(self, group: str) -> Path:
        """What a group's device measured."""
        return self.path / "profiles" / f"{group}.qsync"

    def communication(self, groups: Collection[str]) -> Path:
        """What collectives cost among these groups."""
        return self.path / "communication" / _file_of(groups)

    def plan(self, groups: Collection[str]) -> Path:
        """The plan of a job that has these groups."""
        return self.path / "plans" / _file_of(groups)

    def timeline(self, kind: str, groups: Collection[str]) -> Path:
        """A ``predicted`` or ``measured`` timeline of a job that has these groups."""
        return self.path / "timelines" / kind / _file_of(groups)

    def relative(self, path: Path) -> str:
        """One of these files, as it is called in the folder of every machine."""
        return path.relative_to(self.path).as_posix()

    def planned_groups(self) -> list[tuple[str, ...]]:
        """The sets of groups that there are plans for, largest first."""
        found = [tuple(path.stem.split(_BETWEEN)) for path in (self.path / "plans").glob("*.qsync")]
        return sorted(found, key=lambda groups: (-len(groups), groups))

    def read_cluster(self) -> Cluster:
        """The groups of the job.

        Raises:
            PlanError: when the folder is not there, or is not a finished run folder.
            ClusterError: when the file is wrong.
        """
        if not self.cluster.is_file():
            there = "has no cluster.toml" if self.path.is_dir() else "is not there"
            raise PlanError(f"the run folder {self.path} {there}; 'qsync prepare JOB -o {self.path}' makes it")
        return read_cluster(self.cluster)

    def load_plan(self, groups: Collection[str]) -> PrecisionPlan:
        """The plan of a job that has these groups, and no others.

        Raises:
            PlanError: when there is no plan for them, naming those that there are, or its file holds another job's.
            ArtifactError: when it cannot be read.
        """
        path = self.plan(groups)
        if not path.is_file():
            known = "; ".join(", ".join(names) for names in self.planned_groups()) or "none"
            wanted = ", ".join(sorted(groups))
            raise PlanError(
                f"the run folder {self.path} has no plan for a job of {wanted} (there are plans for: {known}); run 'qsync prepare' "
                "with these groups"
            )
        plan = load(path, PrecisionPlan)
        if (found := {group.group for group in plan.groups}) != set(groups):
            raise PlanError(
                f"{path} is a plan for a job of {', '.join(sorted(found))}, as its name does not say: run 'qsync prepare' again"
            )
        return plan


def _file_of(groups: Collection[str]) -> str:
    """Equal for the same groups in any order."""
    return f"{_BETWEEN.join(sorted(set(groups)))}.qsync"
