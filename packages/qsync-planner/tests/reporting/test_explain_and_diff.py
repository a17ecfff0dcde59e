"""``explain`` and ``diff_plans``: what they select, report and refuse."""

from __future__ import annotations

import attrs
import pytest
from planning_cases import LADDERS, random_case

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_planner.allocator import Request, allocate
from qsync_planner.matching import check_plan
from qsync_planner.reporting.explain import diff_plans, explain, select_operators


@pytest.mark.parametrize(
    "fqn, names",
    [
        (None, ["block.0.up#0", "block.0.down#0", "block.1.up#0", "block.1.down#0", "head#0"]),
        ("block.1", ["block.1.up#0", "block.1.down#0"]),
        ("block.1.", ["block.1.up#0", "block.1.down#0"]),
        ("block.0.up#0", ["block.0.up#0"]),
        ("head", ["head#0"]),
    ],
)
def test_selects_operators_and_modules(fqn: str | None, names: list[str]) -> None:
    plan = allocate(random_case(0).inputs)
    assert [str(op_id) for op_id in select_operators(plan, fqn)] == names


def test_unknown_names_get_suggestions() -> None:
    plan = allocate(random_case(0).inputs)
    with pytest.raises(
        PlanError, match=r"the plan for 'small' has no adjustable operator or module 'block\.0\.upp'; did you mean block"
    ):
        explain(plan, "block.0.upp")
    with pytest.raises(
        PlanError, match=r"has no adjustable operator or module 'xyz'; the plan's operators begin with block\.0\.up#0"
    ):
        explain(plan, "xyz")


def test_every_operator_of_every_group_has_variant_and_reason() -> None:
    plan = allocate(random_case(0, infer_groups=2).inputs)
    data = explain(plan)
    assert [group["group"] for group in data["groups"]] == ["train0", "infer0", "infer1"]
    for group in data["groups"]:
        assert [row["operator"] for row in group["operators"]] == [str(op_id) for op_id in plan.operator_ids]
        for row in group["operators"]:
            assignment = plan.group(group["group"]).assignments[OpId.parse(row["operator"])]
            assert row["variant"] == str(assignment.variant)
            assert row["reason"] == assignment.reason
            assert row["reason"].strip()
        assert sum(group["variants"].values()) == len(plan.operator_ids)


def test_diff_lists_exactly_what_changed() -> None:
    case = random_case(4, ladder=LADDERS[0])
    full, uniform = (
        allocate(case.inputs, Request("full")),
        allocate(case.inputs, Request("uniform")),
    )
    data = diff_plans(full, uniform)
    infer = next(group for group in data["groups"] if group["group"] == "infer0")
    train = next(group for group in data["groups"] if group["group"] == "train0")
    assert train["operators"] == []
    assert [row["operator"] for row in infer["operators"]] == [str(op_id) for op_id in full.operator_ids]
    assert {tuple(row["labels"]) for row in infer["operators"]} <= {("float32", "float16"), ("float32", "float16>float32")}
    assert data["totals"]["solver"] == {"before": "full", "after": "uniform"}
    assert infer["peak_bytes"] == {
        "before": full.group("infer0").predicted_peak_bytes,
        "after": uniform.group("infer0").predicted_peak_bytes,
    }
    assert not data["identical"]
    assert diff_plans(full, full)["identical"]
    assert all(group["operators"] == [] for group in diff_plans(full, full)["groups"])


def test_diff_names_changed_inputs_and_groups() -> None:
    one = allocate(random_case(3, infer_groups=1).inputs)
    case = random_case(3, infer_groups=1)
    other = allocate(case.with_memory(10**9).inputs)
    assert diff_plans(one, other)["inputs_changed"] == ["cluster"]
    train = one.groups[0].group
    kept = {name: {train: getattr(one, name)[train]} for name in ("local_batches", "software", "memory")}
    smaller = attrs.evolve(one, groups=one.groups[:1], recommended_groups=(), recommended_way=None, **kept)
    assert diff_plans(one, smaller)["groups_removed"] == ["infer0"]
    assert diff_plans(smaller, one)["groups_added"] == ["infer0"]


def test_plans_for_other_models_are_named_by_their_first_differences() -> None:
    two, three = random_case(0, blocks=2), random_case(0, blocks=3)
    plan, other = allocate(two.inputs), allocate(three.inputs)
    with pytest.raises(
        PlanError, match=r"the plans are for different graphs .*it has block\.2\.up#0, block\.2\.down#0, which this model lacks"
    ):
        diff_plans(plan, other)
    with pytest.raises(
        PlanError, match=r"the plan is for another graph .*it lacks block\.2\.up#0, block\.2\.down#0; make a plan for this job"
    ):
        check_plan(plan, three.dag)
    check_plan(plan, two.dag)
    batch = attrs.evolve(two.dag, batch_size=8)
    with pytest.raises(PlanError, match="operator names are equal, so shapes, batch size, buckets or classes differ"):
        check_plan(plan, batch)
