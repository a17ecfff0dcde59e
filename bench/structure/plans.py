"""Plans a fixed set of instances exactly, with the packages of a tree, and prints each plan without what names versions.

    PYTHONPATH=... python bench/structure/plans.py TREE [FIRST COUNT]

Words and proven bounds stand apart: sentences say more by now, and bounds are closer.

Runs in a process of its own, with the packages of the tree on its path, and draws the instances with the tree's own tests, so that
it also runs on an older arrangement of the source.  The instances are of row A6's series, which brute force plans too, and four
models as they were measured under three limits.  All rungs of their ladders deliver float32: in which format another rung delivers
is decided from the graph by now, and these plans are to be equal.  Prints a line of JSON for each: its name, the
plan, its bound and its words.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import attrs

TREE = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(TREE / "packages" / "qsync-planner" / "tests"), str(TREE / "tests")]

import brute_force  # noqa: E402  # from here on the tree's own

from qsync_core.artifacts.files import load  # noqa: E402
from qsync_core.cluster_file import read_cluster  # noqa: E402
from qsync_core.errors import QSyncError  # noqa: E402
from qsync_core.ir.dag import PrecisionDag  # noqa: E402
from qsync_core.ir.op_id import OpId  # noqa: E402
from qsync_core.ir.plan import Role  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.profile import Profile  # noqa: E402
from qsync_core.ir.sensitivity import Sensitivity  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_planner.allocator import allocate  # noqa: E402

SEED, DRAWN = 4, 700
"""Row A6's series, and more of it."""
MEASURED = ("h200/resnet50", "h200/bert-base", "cpu/roberta-base", "cpu/vgg16-bn")
TOLERANCES = (0.0, 0.1, 0.5)
VERSIONS = ("output_formats", "dag_digest", "input_digests", "software", "accumulate", "recommended_way")
"""Fields of a plan that name what planned, or that older plans do not have."""
LATER = (", channel_factors=False", ", storage=<Storage.AS_IS: 'as-is'>")
"""What a variant says by now of something that none of these plans may use."""


def main(first: int, count: int) -> None:
    """Plan some of the instances, in their order; those with a base that delivers 16 bits are left out."""
    for number, (name, make, options) in enumerate(instances()):
        if first <= number < first + count:
            found = make()
            if all(group.ladder[-1] == wide(group.ladder[-1]) for group in found.cluster.groups):
                print(json.dumps({"name": name, **planned(found, options)}), flush=True)


def instances() -> Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]:
    """Name, what makes the instance, and further arguments of ``allocate``."""
    for number in range(DRAWN):
        yield f"drawn {number}", lambda number=number: brute_force.draw(SEED, number, delivering_float32).instance, {}
    for folder in MEASURED:
        for tolerance in TOLERANCES:
            yield f"{folder}, tolerance {tolerance}", lambda folder=folder: measured(folder), {"tolerance": tolerance}


def measured(folder: str) -> Any:
    """A stored model."""
    files = TREE / "tests" / "data" / folder
    cluster = read_cluster(files / "cluster.toml")
    profiles = {group.name: load(files / f"profile.{group.name}.qsync", Profile) for group in cluster.groups}
    dag, sensitivity = load(files / "dag.qsync", PrecisionDag), load(files / "sensitivity.qsync", Sensitivity)
    return delivering_float32(brute_force.Instance(folder, dag, cluster, profiles, sensitivity))


def wide(variant: Variant) -> Variant:
    """The same, delivering float32."""
    return attrs.evolve(variant, output=Precision.FLOAT32)


def delivering_float32(instance: Any) -> Any:
    """The same with every rung above the base of a group that helps delivering float32, at the cost that it has."""
    adjustable = {operator.op_id for operator in instance.dag.adjustable}
    groups = tuple(_wide_ladder(group) if group.role is Role.INFER else group for group in instance.cluster.groups)
    known = {id(profile): _wide_costs(profile, adjustable) for profile in instance.profiles.values()}
    omega = {op_id: {wide(v): value for v, value in rated.items()} for op_id, rated in instance.sensitivity.omega.items()}
    return attrs.evolve(
        instance,
        cluster=attrs.evolve(instance.cluster, groups=groups),
        profiles={name: known[id(profile)] for name, profile in instance.profiles.items()},
        sensitivity=attrs.evolve(instance.sensitivity, omega=omega),
    )


def _wide_ladder(group: Any) -> Any:
    """Unless its base delivers 16 bits."""
    *_, base = group.ladder
    return attrs.evolve(group, ladder=tuple(dict.fromkeys(map(wide, group.ladder)))) if base == wide(base) else group


def _wide_costs(profile: Profile, adjustable: Set[OpId]) -> Profile:
    """Costs of variants that deliver 16 bits stay, for groups whose base is one."""
    index = {
        op_id: {wide(v): i for v, i in costs.items()} | dict(costs) if op_id in adjustable else costs
        for op_id, costs in profile.cost_index.items()
    }
    steps = {wide(step.variant): attrs.evolve(step, variant=wide(step.variant)) for step in profile.steps}
    return attrs.evolve(profile, cost_index=index, steps=tuple(steps.values()))


def planned(found: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A plan's fields as text, its bound and its words; of an instance without one the sentence that says why."""
    try:
        plan = exact(found, options)
    except QSyncError as error:
        return {"plan": f"{type(error).__name__}: {error}", "bound": None, "words": ""}
    said = [assignment.reason for group in plan.groups for assignment in group.assignments.values()]
    words = repr((plan.notes, plan.verdict and plan.verdict.sentence, said))
    groups = tuple(attrs.evolve(group, assignments=dict(_wordless(group.assignments))) for group in plan.groups)
    verdict = plan.verdict and attrs.evolve(plan.verdict, sentence="")
    bare = attrs.evolve(plan, notes=(), bound=None, verdict=verdict, groups=groups)
    names = (field.name for field in attrs.fields(type(plan)))
    fields = {name: _as_before(repr(getattr(bare, name))) for name in names if name not in VERSIONS}
    return {"plan": fields, "bound": plan.bound, "words": words}


def _wordless(assignments: Mapping[OpId, Any]) -> Iterator[tuple[OpId, Any]]:
    return ((op_id, attrs.evolve(assignment, reason="")) for op_id, assignment in assignments.items())


def _as_before(text: str) -> str:
    for said in LATER:
        text = text.replace(said, "")
    return text


def exact(found: Any, options: dict[str, Any]) -> Any:
    """The exact solver's plan, asked for as the tree is asked."""
    parts = (found.dag, found.cluster, found.profiles, found.sensitivity)
    if "request" not in inspect.signature(allocate).parameters:
        return allocate(*parts, solver="exact", **options)
    from qsync_planner.allocator import Inputs, Request

    return allocate(Inputs(*parts), Request("exact", **options))


if __name__ == "__main__":
    main(*map(int, sys.argv[2:] or (0, DRAWN + len(MEASURED) * len(TOLERANCES))))
