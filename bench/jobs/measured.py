"""One job: prepared to its end, then trained in every way that is compared; a run that was ended continues where it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybrid.workloads import kept, write
from jobs.places import Place
from jobs.ways import Way, prepare, train, ways_of
from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.run_folder import RunFolder

LEAST_S = 20.0
"""With less time left nothing is started."""
UNIFORM = "uniform"
OPTIONS: Mapping[str, Sequence[str]] = {UNIFORM: ("--solver", "uniform")}
"""Ways beside those that every job has, by the options of ``qsync plan``."""
SLOWER_COMPILED = 4
"""A compiled job may take so many times as long."""
PREPARE_S = 600.0
"""After so many seconds, of all calls together, preparing counts as not having ended."""


@attrs.frozen
class JobOf:
    """A job to be measured.

    Attributes:
        name: of its folder; title: for people.
        model, size: of ``models.py``; on CPUs the size is always small.
        base: ``float32``, or the format of its autocast.
        compiled: whether the script compiles its model.
        others: ways beside those that every job has, by the options of ``qsync plan``.
    """

    name: str
    title: str
    model: str
    base: str
    size: str = "full"
    compiled: bool = False
    others: Mapping[str, Sequence[str]] = attrs.field(factory=lambda: OPTIONS, eq=False)

    def environment(self, run: RunFolder, place: Place) -> dict[str, str]:
        """The script's."""
        found = {"MODEL": self.model, "AMP": "" if self.base == "float32" else self.base, "RUN": str(run.path)}
        found |= {"SIZE": self.size} if place.on_gpus else {}
        return found | ({"COMPILED": "1", "QSYNC_WAIT_FOR_KERNELS": "1"} if self.compiled else {})

    @property
    def patience(self) -> int:
        """How many times as long it may take as one that is not compiled."""
        return SLOWER_COMPILED if self.compiled else 1


@attrs.frozen
class Found:
    """What is known of a job.

    Attributes:
        prepare_s: seconds of all calls; calls: how many.
        prepared: whether it came to its end; why: it did not, or was not measured.
        ways: that were measured; recommended: the name of one.
        is_finished: whether nothing is left to do.
        right_shares: the nearest, where prepare refuses that of the weak group.
        about: machine, versions, commit and device.
    """

    job: JobOf
    prepare_s: float
    calls: int
    prepared: bool
    why: str
    ways: Mapping[str, Way]
    recommended: str
    is_finished: bool
    right_shares: Sequence[float]
    about: Mapping[str, Any]

    @classmethod
    def read(cls, job: JobOf, content: Mapping[str, Any]) -> Found:
        """From a file's content, which may be empty."""
        ways = {name: Way(**way) for name, way in content.get("ways", {}).items()}
        about = {name: content[name] for name in ("machine", "versions", "commit", "device") if name in content}
        plain = {name: content.get(name, default) for name, default in _EMPTY.items()}
        return cls(job=job, ways=ways, about=about, **plain)

    @property
    def done(self) -> dict[str, Way]:
        """The ways that could be measured."""
        return {name: way for name, way in self.ways.items() if way.measured}

    @property
    def told(self) -> str:
        """How far it is, and what was measured (and predicted)."""
        ways = "; ".join(
            f"{name} {way.measured['ms']:.1f} ms" + (f" ({way.predicted_ms:.1f})" if way.predicted_ms else "")
            if way.measured
            else f"{name}: {way.failure}"
            for name, way in self.ways.items()
        )
        state = "finished" if self.is_finished else "to be continued"
        recommended = f"; recommended: {self.recommended}" if self.recommended else ""
        return f"{self.job.title}: prepare {self.prepare_s:.0f} s, {state}. {self.why}{ways}{recommended}"


_EMPTY: Mapping[str, Any] = {
    "prepare_s": 0.0, "calls": 0, "prepared": False, "why": "", "recommended": "", "is_finished": False,
    "right_shares": (),
}  # fmt: skip


def known(job: JobOf, folder: Path, here: Mapping[str, Any]) -> Found:
    """What earlier calls have left in the job's folder of the same ``here``."""
    return Found.read(job, kept(folder / "measured.json", here))


def measure(job: JobOf, place: Place, folder: Path, here: Mapping[str, Any], seconds: Callable[[], float]) -> Found:
    """Go on with a job as far as the time goes.

    Args:
        folder: of this job; what an earlier call has left there of the same ``here`` is not done again.
        here: machine, versions, commit and device.
        seconds: that are left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, run, groups = folder / "measured.json", RunFolder(folder / "run"), tuple(place.ranks)
    found: dict[str, Any] = {**here, **_EMPTY, "ways": {}, **kept(file, here)}
    environment, longest_s = job.environment(run, place), PREPARE_S * job.patience

    def save(**more: Any) -> Found:
        found.update(more)
        write(file, found)
        return Found.read(job, found)

    if found["is_finished"] or seconds() < LEAST_S:
        return Found.read(job, found)
    if not found["prepared"]:
        ended = prepare(place, run, environment, min(seconds(), longest_s - found["prepare_s"]))
        spent = {"prepare_s": round(found["prepare_s"] + ended.seconds, 1), "calls": found["calls"] + 1}
        spent["stages"] = [*found.get("stages", ()), *ended.stages]
        if ended.late and spent["prepare_s"] < longest_s - 1:
            return save(**spent)  # the next call goes on
        if any(ended.statuses) or not run.plan(groups).exists():
            why = f"prepare has not ended within {longest_s:.0f} s" if ended.late else f"prepare failed: {ended.failure}"
            return save(**spent, why=why, is_finished=True, right_shares=ended.right_shares)
        save(**spent, prepared=True)
    if seconds() < LEAST_S:
        return Found.read(job, found)
    name, ways = ways_of(run, groups, folder, job.others)
    save(recommended=name)

    def keep(measured: Mapping[str, Way]) -> None:
        save(ways={name: attrs.asdict(way) for name, way in measured.items()})

    earlier = {name: Way(**way) for name, way in found["ways"].items()}
    _, are_all = train(place, ways, environment, seconds=seconds, keep=keep, known=earlier, patience=job.patience)
    return save(is_finished=are_all)


def plan_of(found: Found, folder: Path, groups: Sequence[str]) -> PrecisionPlan | None:
    """QSync's plan of a prepared job."""
    path = RunFolder(folder / "run").plan(groups)
    return load(path, PrecisionPlan) if found.prepared and path.exists() else None


class Clock:
    """How much time is left of so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()
