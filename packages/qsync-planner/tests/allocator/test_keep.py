"""Operators that a person keeps at the base precision."""

from __future__ import annotations

import attrs
import pytest
from planning_cases import Case, random_case
from synthetic import GraphBuilder

from qsync_core.errors import PlanError
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Request, allocate
from qsync_planner.allocator.keep import kept_operators


def without_rungs(case: Case, names: set[str]) -> Case:
    """The same job whose profiles never measured some operators below the base."""
    base = Variant.plain(case.dag.base)
    profiles = {}
    for group, profile in case.profiles.items():
        index = {
            op_id: {variant: cost for variant, cost in costs.items() if variant == base or op_id.fqn not in names}
            for op_id, costs in profile.cost_index.items()
        }
        profiles[group] = attrs.evolve(profile, cost_index=index)
    return attrs.evolve(case, profiles=profiles)


@pytest.mark.parametrize("solver", ["auto", "exact", "greedy", "uniform"])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_that_of_a_job_in_which_they_cannot_be_lowered(seed: int, solver: str) -> None:
    case = random_case(seed)
    kept = list(dict.fromkeys(operator.op_id.fqn for operator in case.dag.adjustable))[::2]
    found = allocate(case.inputs, Request(solver, keep=kept))
    wanted = allocate(without_rungs(case, {op.fqn for op in kept_operators(case.dag, kept)}).inputs, Request(solver))
    assert found.objective == wanted.objective
    assert found.bound == wanted.bound
    for mine, other in zip(found.groups, wanted.groups, strict=True):
        assert {op: a.variant for op, a in mine.assignments.items()} == {op: a.variant for op, a in other.assignments.items()}


def test_a_name_means_a_module_with_all_in_it_and_a_pattern_whole_names() -> None:
    g = GraphBuilder("named", batch_size=4)
    x = g.input("x", (4, 16))
    for name in ("layers.1.proj", "layers.2.proj", "layers.10.proj"):
        x = g.linear(name, x, 16)
    g.loss(g.linear("head", x, 3))
    dag = g.build(first_bucket=1024, bucket=4096)

    def kept(*asked: str) -> set[str]:
        return {op_id.fqn for op_id in kept_operators(dag, asked)}

    everything = {o.op_id.fqn for o in dag.adjustable}
    assert kept() == set()
    assert kept("head") == {"head"}
    assert kept("layers") == everything - {"head"}
    assert kept("layers.1") == {"layers.1.proj"}
    assert kept("re:.*proj") == everything - {"head"}
    assert kept("head", "re:layers.2.*") == {"head", "layers.2.proj"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer", r"--keep 'layer' means no operator of .* whose precision a plan chooses; it has \d+, among them "),
        ("re:nothing.*", r"--keep 're:nothing\.\*' means no operator"),
        ("re:[", r"--keep 're:\[' is no regular expression \(unterminated character set"),
        ("", r"--keep '' means no operator"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, said: str) -> None:
    case = random_case(2)
    with pytest.raises(PlanError, match=said):
        allocate(case.inputs, Request(keep=[name]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("proj", r"; all that have 'proj' in their names are 're:\.\*proj\.\*'$"),
        ("norm", "; 1 that have 'norm' in their names keep their precision in every plan$"),
        ("re:.*norm.*", "; 1 that have 'norm' in their names keep their precision in every plan$"),
        ("absent", r"'qsync show' lists them\)$"),
    ],
)
def test_a_part_of_names_is_told_what_bears_it(name: str, said: str) -> None:
    g = GraphBuilder("named", batch_size=4)
    x = g.linear("layers.1.proj", g.input("x", (4, 16)), 16)
    g.loss(g.linear("head", g.unary("layers.1.norm", "layer_norm", x), 3))
    with pytest.raises(PlanError, match=said):
        kept_operators(g.build(first_bucket=1024, bucket=4096), [name])
