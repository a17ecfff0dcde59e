"""The run folder: what ``qsync prepare`` leaves for training, and for the next ``qsync prepare`` (docs/run-folder.md)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import attrs

from qsync_core.artifacts.files import load
from qsync_core.cluster_file import GROUP_NAME, GROUP_NAME_RULE, read_cluster
from qsync_core.errors import ArtifactError, PlanError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.units import format_bytes

BETWEEN = "+"
"""Joins group names in a file's name; no group's name has it."""


@attrs.frozen
class RunFolder:
    """Names of the files in a run folder; none of them need exist.

    A plan is kept for every set of groups that may be left to train, because groups come and go.  Others may be able to write the
    folder, and its files name each other, so every name is made here, of a fixed name or of groups' names.

    Every property and method that gives a path raises an ArtifactError where a link leads out of the folder, so that nothing
    outside is read or replaced, and a PlanError for a name that no group can have.
    """

    path: Path = attrs.field(converter=Path)

    @property
    def cluster(self) -> Path:
        """The groups of the job, as a cluster file that a person can read and correct."""
        return self._own("cluster.toml")

    @property
    def dag(self) -> Path:
        """The job's graph."""
        return self._own("job.dag.qsync")

    @property
    def observations(self) -> Path:
        """What indicators are made from."""
        return self._own("job.observations.qsync")

    @property
    def sensitivity(self) -> Path:
        """Ω by operator and precision."""
        return self._own("job.sensitivity.qsync")

    @property
    def report(self) -> Path:
        """The page that shows all of it."""
        return self._own("report.html")

    @property
    def trace(self) -> Path:
        """The predicted and the measured step, for Perfetto."""
        return self._own("report.perfetto.json")

    @property
    def start(self) -> Path:
        """What to type to train, as the report shows it: sentences, and indented the lines for a shell."""
        return self._own("start.txt")

    @property
    def ledger(self) -> Path:
        """What is finished, and from what it was made: by which ``qsync prepare`` continues."""
        return self._own(".prepare/ledger.json")

    @property
    def lock(self) -> Path:
        """Held by the ``qsync prepare`` that works in the folder."""
        return self._own(".prepare/lock")

    def profile(self, group: str) -> Path:
        """What a group's device measured."""
        return self._own(f"profiles/{_file_of([group])}")

    def communication(self, groups: Collection[str]) -> Path:
        """What collectives cost among these groups."""
        return self._own(f"communication/{_file_of(groups)}")

    def plan(self, groups: Collection[str]) -> Path:
        """The plan of a job that has these groups."""
        return self._own(f"plans/{_file_of(groups)}")

    def timeline(self, kind: str, groups: Collection[str]) -> Path:
        """A ``predicted`` or ``measured`` timeline of a job that has these groups."""
        return self._own(f"timelines/{kind}/{_file_of(groups)}")

    @staticmethod
    def is_meant(path: Path) -> bool:
        """Whether a path is a folder's; of nothing that is there, one without a file's suffix is."""
        return path.is_dir() or not (path.suffix or path.exists())

    def partial(self, path: Path) -> Path:
        """What an interrupted measurement has left of one of these files."""
        return self._own(f"{self.relative(path)}.partial")

    def _own(self, name: str) -> Path:
        path = self.path / name
        folder, target = os.path.realpath(self.path), os.path.realpath(path)
        if os.path.commonpath((folder, target)) != folder:
            raise ArtifactError(
                f"{path} leads out of the run folder, to {target}, through a link: put the file in its place, or remove the link"
            )
        return path

    def relative(self, path: Path) -> str:
        """Name a file of this folder as it is called in the folder of every machine."""
        return path.relative_to(self.path).as_posix()

    def planned_groups(self) -> list[tuple[str, ...]]:
        """The sets of groups that there are plans for, largest first."""
        named = ((path, tuple(path.stem.split(BETWEEN))) for path in self._own("plans").glob("*.qsync"))
        found = [groups for path, groups in named if all(map(GROUP_NAME.fullmatch, groups)) and _file_of(groups) == path.name]
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

    def load_plan_to_train(self, groups: Collection[str]) -> PrecisionPlan:
        """The same, where the cluster file still gives each group the memory that the plan was made for.

        Raises:
            PlanError: as :meth:`load_plan`, and where it gives another.
            ClusterError, ArtifactError: when a file is wrong, or cannot be read.
        """
        plan, given_to = self.load_plan(groups), {group.name: group.memory_bytes for group in self.read_cluster().groups}
        for entry in plan.groups:
            planned = entry.memory_budget_bytes
            if (given := given_to.get(entry.group, planned)) != planned:
                said, before = (format_bytes(nbytes) if nbytes else "no limit" for nbytes in (given, planned))
                raise PlanError(
                    f"{self.cluster} has {said} for the memory of group {entry.group!r}, and its plan was made for {before}: run "
                    "'qsync prepare' again, or write that"
                )
        return plan


def key_of(groups: Iterable[str]) -> str:
    """How a run folder calls a set of groups, in any order."""
    return BETWEEN.join(sorted(set(groups)))


def _file_of(groups: Collection[str]) -> str:
    """Name the file of a set of groups.

    Raises:
        PlanError: for what is no group's name.
    """
    if (wrong := next((group for group in groups if not GROUP_NAME.fullmatch(group)), None)) is not None:
        raise PlanError(f"{wrong[:80]!r} names no file of a run folder: {GROUP_NAME_RULE}")
    return f"{key_of(groups)}.qsync"
