"""A job prepared by ``qsync prepare``, and trained in every way that is compared, one after the other in one start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jobs.places import Ended, Place
from qsync_core.artifacts.files import load
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.run_folder import RunFolder
from qsync_torch.prepare.cluster_text import cluster_text
from qsync_torch.prepare.planning import part_of

SCRIPT = Path(__file__).with_name("script.py")
READING = Path(__file__).with_name("reading.py")
LIMITS_S = {"prepare": (300, 400), "train": (60, 120)}
"""Seconds of a phase on GPUs and CPUs; of training, for each way."""
TUNE_S = 15
TUNE = ("--tune", str(TUNE_S))
"""How long kernels are tuned in a job; the others continue with what it has found."""
ALONE = "alone"
"""The first group without the others; the script's name of that mode."""
_LEAST_S = 20.0
"""With less time left nothing is started."""


def limit_s(phase: str, place: Place) -> float:
    """Seconds that a phase may take there."""
    return LIMITS_S[phase][not place.on_gpus]


@attrs.frozen
class Way:
    """A way that was measured, or was to be: its prediction, what was measured, or why not."""

    predicted_ms: float | None
    measured: Mapping[str, Any] | None
    failure: str = ""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return 1e3 * self.measured["samples"] / self.measured["ms"] if self.measured else 0.0

    @property
    def off(self) -> float:
        """By which part of it the measured step is predicted wrongly."""
        if not self.measured or not self.predicted_ms:
            return float("inf")
        return abs(self.predicted_ms / self.measured["ms"] - 1)


@attrs.frozen
class Planned:
    """A way to train: the script's name of it or a plan's path, the groups that do, and the predicted step."""

    mode: str
    groups: tuple[str, ...]
    predicted_ns: int | None = None


def prepare(place: Place, run: RunFolder, extra: Mapping[str, str], seconds: float, script: Path = SCRIPT) -> Ended:
    """``qsync prepare`` of the script on all groups, which continues in a folder that is not finished."""
    run.path.parent.mkdir(parents=True, exist_ok=True)
    command = ["-m", "qsync", "prepare", str(script), "-o", str(run.path), *TUNE]
    return place.run(tuple(place.ranks), command, {**extra, "RUN": str(run.path)}, seconds)


def planned(run: RunFolder, groups: Sequence[str], options: Sequence[str], path: Path) -> PrecisionPlan:
    """What ``qsync plan`` makes of a run folder's measurements for all of some groups."""
    cluster, described = run.read_cluster(), run.cluster
    if set(groups) != {group.name for group in cluster.groups}:  # a cluster file of these, which a person would write
        part = part_of(cluster, groups, {name: load(run.profile(name), Profile) for name in groups})
        described = path.with_suffix(".toml")
        described.write_text(cluster_text(cluster.name, part.groups, part.links), encoding="utf-8")
    line = [sys.executable, "-m", "qsync", "plan", "--dag", str(run.dag), "--cluster", str(described)]
    for name in groups:
        line += ["--profile", f"{name}={run.profile(name)}"]
    if run.communication(groups).exists():
        line += ["--communication", str(run.communication(groups))]
    line += ["--sensitivity", str(run.sensitivity), *options, "-o", str(path)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return load(path, PrecisionPlan)


def ways_of(
    run: RunFolder, groups: Sequence[str], folder: Path, others: Mapping[str, Sequence[str]] = {}
) -> tuple[str, dict[str, Planned]]:
    """The name of the way that the verdict recommends, and all ways: in the base, the first group alone, under QSync's plan, as
    recommended, and others by the options of ``qsync plan``.

    Args:
        folder: of the plans that are made.
    """
    plan, everyone = load(run.plan(groups), PrecisionPlan), tuple(groups)
    first = everyone[:1]
    alone = load(run.plan(first), PrecisionPlan).predicted_iteration_ns if run.plan(first).exists() else None
    ways = {
        "full": Planned("full", everyone, plan.baselines.get("full")),
        f"{first[0]} alone": Planned(ALONE, everyone, alone),
        "plan": Planned("plan", everyone, plan.predicted_iteration_ns),
    }

    def add(name: str, who: Sequence[str], options: Sequence[str]) -> None:
        path = folder / f"{name.replace(' ', '-').replace('/', '-')}.qsync"
        found = planned(run, who, options, path)
        ways[name] = Planned(str(path), tuple(entry.group for entry in found.groups), found.predicted_iteration_ns)

    for name, options in others.items():
        add(name, everyone, options)
    best = plan.recommended_way
    options = best.options.split() if best is not None else []
    who = best.groups if best is not None else plan.recommended_groups or everyone
    if who == first:
        return f"{first[0]} alone", ways
    if "full" in options and who == everyone:
        return "full", ways
    if not options and who == everyone:
        return "plan", ways
    name = next((name for name, said in others.items() if list(said) == options and who == everyone), "")
    if not options:  # the run folder's plan of these groups
        name = " and ".join(who)
        ways[name] = Planned("plan", tuple(who), load(run.plan(who), PrecisionPlan).predicted_iteration_ns)
    elif not name:
        name = " ".join(["qsync plan", *options] + ([] if who == everyone else ["of", " and ".join(who)]))
        add(name, who, options)
    return name, ways


def train(
    place: Place,
    ways: Mapping[str, Planned],
    extra: Mapping[str, str],
    *,
    seconds: Callable[[], float] = lambda: float("inf"),
    keep: Callable[[Mapping[str, Way]], None] = lambda found: None,
    known: Mapping[str, Way] = {},
    patience: int = 1,
    script: Path = SCRIPT,
) -> tuple[dict[str, Way], bool]:
    """Train in every way: those of all groups in one start, then each that has not been measured by itself.

    Args:
        seconds: that are left; what is cut off by their end is not measured.
        keep: is given all that is finished, after every start.
        known: what was finished before, by name.
        patience: how many times as long a way may take.

    Returns:
        The ways that are finished, and whether these are all.
    """
    everyone, found = tuple(place.ranks), {name: way for name, way in known.items() if name in ways}
    extra, one = {**extra, "FIRST": str(place.ranks[everyone[0]])}, patience * limit_s("train", place)
    together = [name for name, way in ways.items() if way.groups == everyone]
    starts = [together] if sum(name not in found for name in together) > 1 else []
    for names in [*starts, *([name] for name in ways)]:
        left = [name for name in names if name not in found]
        if not left:
            continue
        if seconds() < _LEAST_S:
            return found, False
        modes = " ".join(dict.fromkeys(ways[name].mode for name in left))
        most = min(one * len(left), seconds())
        ended = place.run(ways[left[0]].groups, [str(script)], {**extra, "MODES": modes}, most)
        cut_off = ended.late and most < one * len(left)
        for name in left:
            predicted_ms = None if (ns := ways[name].predicted_ns) is None else ns / 1e6
            measured = ended.steps.get(ways[name].mode)
            if measured or (len(left) == 1 and not cut_off):  # else the failure may be that of a way before it
                found[name] = Way(predicted_ms, measured, "" if measured else ended.failure or "it has measured nothing")
        keep(found)
        if cut_off:
            return found, False
    return found, True
