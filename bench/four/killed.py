"""Row Q5: a rank of a weak group is killed in training, the job goes on without it, and with it again.

The example ``elastic_digits.py`` under an agent of torchrun for each rank.  Every step that counts must have, on every rank, the
loss that it has in a job of the same ranks that nobody disturbs, which is started from the same checkpoint, and the last checkpoint
its parameters and momenta, to the bit.  What is killed is a machine: the agent and its rank.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "distributed"))

from elastic_job import CPU, ElasticJob, differences, make_run_folder

from four.layouts import Layout, machines_by_rank
from hybrid.workloads import kept, write
from jobs.places import Place
from qsync_core.ir.profile import DeviceKind, DeviceType

KILLS = 5
SAVE_EVERY = 5
ENDLESS = 1_000_000
LONGEST_S = 1.0
"""A kill comes at most so long after all ranks train; so does the machine's return."""
WAIT_S = 5
"""For how long those that are left wait for others."""
KILL_S = 90.0
"""What a kill, and the undisturbed job beside it, takes at most, for the time that is left."""
OTHERWISE = "the undisturbed job has its ranks in another order"
NAMES = {"a": "train", "b": "infer"}
"""Of the example's groups."""


@attrs.frozen
class Resumed:
    """What came of some kills: of how many the job went on without the rank and then with it, and what was not as undisturbed."""

    kills: int
    resumed: int
    faults: tuple[str, ...]
    segments: tuple[tuple[tuple[str, ...], int, int], ...]


@attrs.frozen
class Kills:
    """Kills of a layout.

    Attributes:
        devices: of the groups; environments: of every machine, by its name.
    """

    layout: Layout
    devices: Mapping[str, DeviceType]
    environments: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, layout: Layout, place: Place, gpu: str) -> Kills:
        """On a place's machines; ``gpu``: the device's name, of no matter where there is none."""
        by_group: Counter[str] = Counter()
        environments, devices = {}, {}
        for machine in machines_by_rank(place):
            group, number = NAMES[machine.group], by_group[machine.group]
            by_group[machine.group] += 1
            environments[f"{group}.{number}" if number else group] = {**machine.environment, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            share = layout.by_group[machine.group][1]
            devices[group] = DeviceType(gpu, DeviceKind.CUDA, share=share) if place.on_gpus else CPU
        return cls(layout, devices, environments)

    @property
    def groups(self) -> tuple[str, ...]:
        """A group's name for each rank."""
        return tuple(NAMES[group] for group, (count, _) in self.layout.by_group.items() for _ in range(count))

    def job(self, run: Any, folder: Path, steps: int, groups: Sequence[str], least: int) -> ElasticJob:
        """A job of these ranks, which goes on with ``least`` of them."""
        return ElasticJob(
            run, folder, steps, SAVE_EVERY, groups=groups, least=least, most=len(groups), wait_s=WAIT_S,
            environments=self.environments, torchrun=True,
        )  # fmt: skip

    def once(self, folder: Path, seed: int) -> Resumed:
        """One kill, and the jobs that it is compared with.

        Args:
            seed: of the moments, and of which weak rank goes.
        """
        moments, ranks = random.Random(seed), self.layout.ranks
        counts = {NAMES[group]: count for group, (count, _) in self.layout.by_group.items()}
        run = make_run_folder(folder / "run", counts=counts, devices=self.devices)
        victim = moments.choice([name for name in self.environments if name.startswith("infer")])
        survivor, resumed = "train", 0
        with self.job(run, folder / "killed", ENDLESS, self.groups, ranks - 1) as job:
            _until(job, survivor, ranks, "steps of all")
            time.sleep(moments.uniform(0, LONGEST_S))
            job.kill_machine(victim)
            _until(job, survivor, ranks - 1, "steps of those that are left")
            time.sleep(moments.uniform(0, LONGEST_S))
            job.start(victim)
            _until(job, survivor, ranks, "steps of all again")
            resumed = 1
            time.sleep(LONGEST_S)
        last = job.newest()
        segments = tuple(job.segments(last["step"]))
        expected: dict[tuple[int, str], float] = {}
        for groups, begin, end in segments:
            # Sums of gradients are in the order of ranks, which is that in which agents were started.
            with self.job(run, folder / "undisturbed", end, groups, len(groups)) as reference:
                found = reference.finish()
            if (numbered := list(reference.segments(end))[-1][0]) != groups:  # process ids have begun anew
                return Resumed(1, resumed, (f"{OTHERWISE}: {numbered}, not {groups}",), segments)
            for line in _lines(reference):
                if begin < line["step"] <= end and line["ranks"] == len(groups):
                    expected[line["step"], line["place"]] = line["loss"]
        faults = differences(last, found)
        here = {step: len(groups) for groups, begin, end in segments for step in range(begin + 1, end + 1)}
        ours = {(line["step"], line["place"]): line["loss"] for line in _lines(job) if line["ranks"] == here.get(line["step"])}
        faults += [f"no loss of {place} in step {step}" for step, place in sorted(set(expected) - set(ours))[:3]]
        off = {key: abs(ours[key] / expected[key] - 1) for key in sorted(set(expected) & set(ours)) if ours[key] != expected[key]}
        faults += [f"loss of {place} in step {step} off by {part:.1e}" for (step, place), part in list(off.items())[:3]]
        return Resumed(1, resumed, tuple(faults), segments)


def _lines(job: ElasticJob) -> Iterator[dict[str, Any]]:
    for machine in job.machines:
        yield from job.losses(machine)


def _until(job: ElasticJob, machine: str, ranks: int, what: str) -> None:
    """Wait until a machine that stays has trained among so many ranks, since now."""
    before = len(job.losses(machine))
    job.wait(lambda: any(line["ranks"] == ranks for line in job.losses(machine)[before:]), what)


def measure(kills: Kills, folder: Path, here: Mapping[str, Any], seconds: Callable[[], float]) -> dict[str, Any]:
    """Go on with a layout's kills as far as the time goes; what an earlier call has left of the same ``here`` counts."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "kills.json"
    found: dict[str, Any] = {**here, "kills": [], **kept(file, here)}
    while len(found["kills"]) < KILLS and seconds() > KILL_S:
        number = len(found["kills"])
        work = folder / f"kill{number}"
        shutil.rmtree(work, ignore_errors=True)
        try:
            one = attrs.asdict(kills.once(work, seed=17 + number))
        except AssertionError as error:  # the job did not go on
            one = attrs.asdict(Resumed(1, 0, (str(error)[-400:],), ()))
        if any(fault.startswith(OTHERWISE) for fault in one["faults"]):
            print(f"{kills.layout}, kill {number + 1} is tried again: {one['faults'][0]}", flush=True)
            continue
        found["kills"].append(one)
        shutil.rmtree(work, ignore_errors=True)
        write(file, found)
        said = "; ".join(one["faults"]) or "as undisturbed"
        print(f"{kills.layout}, kill {number + 1} of {KILLS}: {said}; {one['segments']}", flush=True)
    return found


def row(id_: str, layout: Layout, found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row of a layout's kills."""
    good = sum(bool(one["resumed"]) and not one["faults"] for one in found["kills"])
    faults = "; ".join(fault for one in found["kills"] for fault in one["faults"])
    about = {name: found[name] for name in ("machine", "versions", "commit", "device") if name in found}
    return {
        "id": id_,
        "what": f"kills of a rank of the weak group ({layout}, {where}) after which the job went on with those that are left under "
        "their plan, and with all again: losses of every step and rank, parameters and momenta as of undisturbed jobs of these "
        f"that start from the same checkpoints; {len(found['kills'])} of {KILLS} kills were tried",
        "value": good,
        "unit": f"kills of {KILLS}",
        "spread": faults or "bit for bit",
        "target": f"{KILLS} of {KILLS}",
        **about,
    }
