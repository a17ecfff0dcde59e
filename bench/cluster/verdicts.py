"""C9: verdicts of random clusters against the best of all ways to run the job, found by trying them.

    python bench/cluster/verdicts.py [--count 100] [--seed 0] [--out FOLDER]

Each cluster has one to three groups of ranks: a stored profile's devices, or chips estimated from it; random roles, numbers of
ranks, links, memory budgets, bases and ladders.  What the verdict recommends is planned with the command that it names, and
replayed; the best way is found in ``every_way.py``.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

from every_way import EveryWay, Found

from qsync_core.artifacts.files import digest, load
from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.profile import DeviceKind, Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.estimating import estimate
from qsync_planner.estimating.chips import DATASHEETS
from qsync_planner.replayer.replay import Replayer
from results import parser_of, write_rows

STORED = Path(__file__).resolve().parents[2] / "tests" / "data"
SOURCES = (*2 * ("h200/resnet50", "h200/bert-base", "h100/vgg16-bn"), "cpu/vgg16-bn", "cpu/roberta-base")
"""Jobs whose graph and profiles are stored, those that can be estimated for other chips twice as often."""
WITHOUT_BFLOAT16 = ("V100", "T4")
MISSED_BY = 0.01
COMMANDS: dict[str, dict[str, Any]] = {
    "--solver full": {"solver": "full"},
    "--solver dynamic-batch": {"solver": "dynamic-batch"},
    "--minimise time": {"objective": "time"},
    "--batch free --minimise time": {"batch": "free", "objective": "time"},
}
"""What the command that a verdict names asks of the allocator."""


@attrs.frozen
class Drawn:
    """A random cluster and its job."""

    name: str
    dag: PrecisionDag
    cluster: Cluster
    profiles: dict[str, Profile]
    sensitivity: Sensitivity


@functools.cache
def stored(source: str) -> tuple[PrecisionDag, dict[str, Profile]]:
    """A stored job."""
    folder = STORED / source
    profiles = {role: load(folder / f"profile.{role}.qsync", Profile) for role in ("train", "infer")}
    return load(folder / "dag.qsync", PrecisionDag), profiles


@functools.cache
def estimated(source: str, chip: str, share: float) -> Profile:
    """A stored job's profile on another chip."""
    dag, profiles = stored(source)
    return estimate(dag, profiles["train"], chip, share).profile


def draw(seed: int, number: int, sources: tuple[str, ...] = SOURCES) -> Drawn:
    """The random cluster of that number in the series of a seed; those that no plan fits are drawn again."""
    for attempt in itertools.count():
        rng = random.Random(f"cluster {seed} {number} {attempt}")
        drawn = _draw(rng, f"{seed}.{number}.{attempt}", rng.choice(sources))
        try:
            allocate(Inputs(drawn.dag, drawn.cluster, drawn.profiles), Request("uniform"))
        except InfeasibleError:
            continue
        return drawn
    raise AssertionError


def _draw(rng: random.Random, name: str, source: str) -> Drawn:
    dag, measured = stored(source)
    count = rng.choice((1, 2, 2, 2, 2, 2, 3, 3, 3))
    old = rng.random() < 0.2
    profiles = {}
    for number in range(count):
        if measured["train"].device.kind is DeviceKind.CPU or (rng.random() < 0.15 and not old):
            profiles[f"g{number}"] = measured[rng.choice(("train", "infer"))]
        else:
            chip = rng.choice(WITHOUT_BFLOAT16 if old else tuple(DATASHEETS))
            profiles[f"g{number}"] = estimated(source, chip, rng.choice((1.0, 1.0, 1.0, 0.5, 0.25)))
    bases = set.intersection(
        *({step.variant for step in profile.steps if _is_plain(step.variant)} for profile in profiles.values())
    )
    base = rng.choice(sorted(bases, key=str))
    groups = [_group(rng, dag, name, profile, base, train=number == 0) for number, (name, profile) in enumerate(profiles.items())]
    pairs = [*itertools.combinations([group.name for group in groups], 2), *((g.name, g.name) for g in groups if g.count > 1)]
    links = tuple(Link(pair, rng.uniform(2e3, 5e4), 8 / 10 ** rng.uniform(1, 3.4)) for pair in pairs)
    variants = {variant for group in groups for variant in group.ladder} - {base}
    omega = {operator.op_id: {variant: rng.random() for variant in sorted(variants, key=str)} for operator in dag.adjustable}
    return Drawn(name, dag, Cluster(name, tuple(groups), links), profiles, Sensitivity(dag.model, digest(dag), "", "drawn", omega))


def _is_plain(variant: Variant) -> bool:
    return not variant.compute.needs_scale and variant == Variant.plain(variant.compute)


def _group(rng: random.Random, dag: PrecisionDag, name: str, profile: Profile, base: Variant, *, train: bool) -> DeviceGroup:
    role = Role.TRAIN if train or rng.random() < 0.2 else Role.INFER
    rungs = sorted((step.variant for step in profile.steps), key=lambda rung: (rung.compute.nbytes, str(rung)))
    lower = [rung for rung in rungs if rung.compute.nbytes < base.compute.nbytes and rng.random() < 0.8]
    ladder = (base,) if role is Role.TRAIN else (*lower, base)
    device = profile.device
    group = DeviceGroup(name, device.name, rng.randrange(1, 9), role, base.compute, ladder, 0, device.share)
    one = Cluster("one", (attrs.evolve(group, count=1),))
    replayer = Replayer(Inputs(dag, one, {name: profile}))
    full = replayer.memory(name, replayer.base_variants(name)).process_bytes
    budget = round(full * rng.uniform(1.02, 2.5)) if role is Role.TRAIN else round(full * rng.uniform(0.6, 2.5))
    return attrs.evolve(group, memory_bytes=budget if rng.random() < 0.5 else 0)


def achieved(drawn: Drawn, every: EveryWay, plan: PrecisionPlan) -> float:
    """Samples per second of what a plan's verdict recommends, planned with the command that it names."""
    way = plan.recommended_way
    groups = tuple(group.group for group in plan.groups) if way is None else way.groups
    if way is not None and way.options:
        profiles = {name: drawn.profiles[name] for name in groups}
        plan = allocate(Inputs(drawn.dag, every.part(groups), profiles, drawn.sensitivity), Request(**COMMANDS[way.options]))
    batches = {name: plan.local_batches[name] for name in groups}
    variants = {name: {o: entry.variant for o, entry in plan.group(name).assignments.items()} for name in groups}
    samples = sum(drawn.cluster.group(name).count * batch for name, batch in batches.items())
    return samples * 1e9 / every.replay_ns(batches, variants)


@attrs.frozen
class Judgement:
    """One verdict: what it promises and what its command achieves, in samples per second, beside the best of all ways."""

    drawn: Drawn
    sentence: str
    options: str
    promised: float
    achieved: float
    best: Found

    @property
    def missed(self) -> float:
        """The part of the best way's samples per second that whoever follows the verdict goes without."""
        return max(0.0, 1 - self.achieved / self.best.rate)

    @property
    def overstated(self) -> float:
        """By which part the verdict promises more than its command achieves."""
        return max(0.0, self.promised / self.achieved - 1)


def judgement(drawn: Drawn) -> Judgement:
    """What the planner says of a cluster, and the best of all ways."""
    every = EveryWay(drawn.dag, drawn.cluster, drawn.profiles)
    plan = allocate(Inputs(drawn.dag, drawn.cluster, drawn.profiles, drawn.sensitivity))
    got = achieved(drawn, every, plan)
    way = plan.recommended_way
    sentence = plan.verdict.sentence if plan.verdict else "no verdict: one group"
    return Judgement(drawn, sentence, way.options if way else "", way.samples_per_second if way else got, got, every.best())


def judgements(count: int, seed: int) -> Iterator[Judgement]:
    """Of a series."""
    return (judgement(draw(seed, number)) for number in range(count))


def main() -> None:
    """Measure C9."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=100, help="clusters")
    parser.add_argument("--seed", type=int, default=0, help="of the series")
    options = parser.parse_args()
    missed, worst, overstated, kinds = [], 0.0, 0.0, {}
    for number, one in enumerate(judgements(options.count, options.seed)):
        worst, overstated = max(worst, one.missed), max(overstated, one.overstated)
        kinds[one.options] = kinds.get(one.options, 0) + 1
        text = f"{one.drawn.name} {one.drawn.dag.model}: {one.achieved:.5g} of {one.best.rate:.5g} samples/s"
        print(f"{number}: {text} ({one.missed:.2%} missed, {one.overstated:.2%} overstated): {one.sentence}", flush=True)
        if one.missed > MISSED_BY:
            missed.append(f"{text} with {dict(one.best.local_batches)}")
            print(f"   MISSED {one.best}", flush=True)
    said = ", ".join(f"{count} × {kind or 'the plan itself'}" for kind, count in sorted(kinds.items()))
    row = {
        "id": "C9",
        "what": f"verdicts of {options.count} random clusters (1 to 3 groups, no measured contention) against the best of all "
        f"ways, found by trying them: missed by more than 1%; recommended were {said}",
        "value": len(missed),
        "unit": "verdicts",
        "spread": f"the worst misses {worst:.2%}, and promises {overstated:.2%} more than its command achieves"
        + (f"; missed: {'; '.join(missed)}" if missed else ""),
        "target": "0",
    }
    command = f"python bench/cluster/verdicts.py --count {options.count} --seed {options.seed}"
    write_rows("cluster", [row], command, directory=options.out)
    print(row["what"], row["value"], row["spread"], sep="\n")


if __name__ == "__main__":
    main()
