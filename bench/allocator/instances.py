"""The planning instances of rows A1 to A7.  The same arguments give the same instance.

They were fixed before any solver was tuned on them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import attrs
from synthetic import LADDER, hybrid_cluster, hybrid_profiles, transformer

from allocator.budgets import with_budgets
from allocator.hardware import LINKS_GBPS, PAIRS, Helpers, cluster_of, ladder, profiles_of
from allocator.models import model
from allocator.sensitivities import drawn_sensitivity
from qsync_core.artifacts.files import digest, load
from qsync_core.cluster_file import read_cluster
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_planner.allocator.exact.programs import Programs
from qsync_planner.allocator.problem import build_problem
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

REGIMES = ("time", "memory", "both")
"""``time``: no memory budget.  ``memory``: budgets that bind, and time for ten times uniform precision.  ``both``: budgets, and no
more time than uniform precision takes."""
LOOSE_TOLERANCE = 10.0

REAL = Path(__file__).resolve().parents[2] / "tests" / "data" / "h200"
REAL_PREFIX = "real:"
"""``real:bert-base`` and ``real:resnet50`` are profiles and sensitivities measured on an H200."""

LARGE_TRAIN = ("A100", "V100")
LARGE_INFER = ("T4", "L4", "A10", "T4", "L4", "A10")


@attrs.frozen(eq=False)
class Instance:
    """What ``allocate`` takes, and how it was drawn."""

    name: str
    regime: str
    seed: int
    dag: PrecisionDag
    cluster: Cluster
    profiles: Mapping[str, Profile]
    sensitivity: Sensitivity
    tolerance: float
    symmetric: bool = False

    @property
    def label(self) -> str:
        """How the instance is called in results."""
        return f"{self.name} {self.cluster.name} {self.regime} {self.seed}{' symmetric' if self.symmetric else ''}"


def instance(name: str, hardware: str, regime: str, seed: int, *, symmetric: bool = False) -> Instance:
    """One training and one inference group of two ranks each.

    Drawn from the model, the hardware and the seed: the link between them (16, 32 or 100 Gbit/s), each kernel's distance from its
    roofline and the sensitivities; then, from the regime too, the memory budget.

    Args:
        name: a model of :mod:`allocator.models`, or ``real:bert-base``, ``real:resnet50``, whose hardware is what was measured.
        hardware: one of :data:`~allocator.hardware.PAIRS`.
        regime: one of :data:`REGIMES`.
        seed: any integer.
        symmetric: identical layers have equal Ω, or nearly (which of the two, the seed says).
    """
    if regime not in REGIMES:
        raise ValueError(f"regimes are {', '.join(REGIMES)}, got {regime!r}")
    if name.startswith(REAL_PREFIX):
        return _real(name, regime, seed)
    train, infer = PAIRS[hardware]
    draw = random.Random(f"{name} {hardware} {seed} {'symmetric' if symmetric else ''}")
    dag = _dag(name)
    cluster = cluster_of(hardware, [Helpers(train, 2)], [Helpers(infer, 2)], draw.choice(LINKS_GBPS))
    profiles = profiles_of(dag, cluster, draw)
    sensitivity = drawn_sensitivity(dag, ladder(infer), draw, symmetric=seed if symmetric else None)
    return attrs.evolve(_in_regime(name, regime, seed, dag, cluster, profiles, sensitivity), symmetric=symmetric)


def large_instance(
    seed: int, *, name: str = "transformer-10000", regime: str = "both", ranks: int = 32, symmetric: bool = False
) -> Instance:
    """Eight device groups of five types, two of which train; groups of one type differ in their budgets.

    Drawn as in :func:`instance`.  ``ranks`` is divided evenly among the groups and nothing else depends on it, except that rings
    of other lengths take slightly different times.
    """
    groups = len(LARGE_TRAIN) + len(LARGE_INFER)
    if ranks % groups:
        raise ValueError(f"the ranks are divided among {groups} groups, got {ranks}")
    draw = random.Random(f"{name} eight groups {seed} {'symmetric' if symmetric else ''}")
    dag = _dag(name)
    train, infer = ([Helpers(chip, ranks // groups) for chip in chips] for chips in (LARGE_TRAIN, LARGE_INFER))
    cluster = cluster_of(f"{groups} groups", train, infer, draw.choice(LINKS_GBPS))
    profiles = profiles_of(dag, cluster, draw)
    variants = [variant for chip in dict.fromkeys(LARGE_INFER) for variant in ladder(chip)]
    sensitivity = drawn_sensitivity(dag, variants, draw, symmetric=seed if symmetric else None)
    return attrs.evolve(_in_regime(name, regime, seed, dag, cluster, profiles, sensitivity), symmetric=symmetric)


def many_groups_instance(seed: int, groups: int, *, alike: bool = True) -> Instance:
    """BERT-base on so many device groups of four ranks, an eighth of which train; every helping group has a budget of its own.

    Drawn as in :func:`instance`.

    Args:
        seed: any integer.
        groups: how many, a multiple of 8.
        alike: groups of one chip share a profile; else every group's kernels are drawn anew.
    """
    draw = random.Random(f"{groups} groups {seed} {'' if alike else 'of their own'}")
    dag = _dag("bert-base")
    train = [Helpers(LARGE_TRAIN[i % len(LARGE_TRAIN)], 4) for i in range(groups // 8)]
    infer = [Helpers(LARGE_INFER[i % len(LARGE_INFER)], 4) for i in range(groups - groups // 8)]
    cluster = cluster_of(f"{groups} groups{'' if alike else ' of their own'}", train, infer, draw.choice(LINKS_GBPS))
    if alike:
        profiles = profiles_of(dag, cluster, draw)
    else:
        profiles = {}
        for group in cluster.groups:
            profiles |= profiles_of(dag, attrs.evolve(cluster, groups=(group,), links=()), draw)
    variants = [variant for chip in dict.fromkeys(LARGE_INFER) for variant in ladder(chip)]
    sensitivity = drawn_sensitivity(dag, variants, draw, symmetric=None)
    return _in_regime(dag.model, "both", seed, dag, cluster, profiles, sensitivity)


def tight_instance(seed: int, *, layers: int) -> Instance:
    """A transformer on V100 and T4 whose budget is half-way between the leanest mixed plan and the leanest single rung.

    The ladder is int8 written to float32, float16, float32: no single rung is as lean as a mixture.
    """
    draw = random.Random(f"tight {layers} {seed}")
    dag = transformer(layers=layers)
    profiles = {name: attrs.evolve(found, dag_digest=digest(dag)) for name, found in hybrid_profiles(dag).items()}
    sensitivity = drawn_sensitivity(dag, LADDER, draw, symmetric=None)
    roomy = hybrid_cluster()
    problem = build_problem(Inputs(dag, roomy, profiles, sensitivity))
    programs = Programs(Replayer(Inputs(dag, roomy, profiles)))
    leanest = programs.leanest(problem.groups[0])
    assert leanest is not None, "without limits there is a plan"
    rungs = min(entry.peak_bytes for entry in programs.at_rungs(problem.groups[0]))
    cluster = hybrid_cluster(memory_bytes=(leanest.peak_bytes + rungs) // 2)
    return Instance(f"transformer of {layers} layers", "tight", seed, dag, cluster, profiles, sensitivity, 0.0)


def _real(name: str, regime: str, seed: int) -> Instance:
    """A stored profile; only the memory budget of the regimes that have one is drawn."""
    folder = REAL / name.removeprefix(REAL_PREFIX)
    cluster = read_cluster(folder / "cluster.toml")
    groups = tuple(attrs.evolve(group, memory_bytes=0) if group.role is Role.INFER else group for group in cluster.groups)
    profiles = {group.name: load(folder / f"profile.{group.name}.qsync", Profile) for group in groups}
    sensitivity = load(folder / "sensitivity.qsync", Sensitivity)
    dag = load(folder / "dag.qsync", PrecisionDag)
    cluster = attrs.evolve(cluster, name="H200", groups=groups)
    return _in_regime(name, regime, seed, dag, cluster, profiles, sensitivity)


def _in_regime(
    name: str,
    regime: str,
    seed: int,
    dag: PrecisionDag,
    cluster: Cluster,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
) -> Instance:
    """The instance with its budgets and its tolerance."""
    if regime != "time":
        cluster = with_budgets(dag, cluster, profiles, random.Random(f"{name} {cluster.name} {regime} {seed} budgets"))
    return Instance(name, regime, seed, dag, cluster, profiles, sensitivity, LOOSE_TOLERANCE if regime == "memory" else 0.0)


_dag = cache(model)
