"""Every command on ResNet50, VGG16-BN, BERT-base and RoBERTa-base; the planner's in an environment without torch."""

from __future__ import annotations

import hashlib
import json
import re

import attrs
import pytest

from qsync_core.artifacts.files import load, save
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline

ADJUSTABLE = {"resnet50": 54, "vgg16_bn": 16, "bert-base": 13, "roberta-base": 14}
"""ResNet50 has 53 convolutions and a linear layer, VGG16 13 and 3; a layer of BERT has 6 linear layers; its head for questions has
one, RoBERTa's for choices two."""


def model(flow) -> str:
    return flow.job.split(":")[0]


def test_trace_finds_every_linear_layer_and_convolution(flow):
    assert sum(flow.traced["classes"]["adjustable"].values()) == ADJUSTABLE[model(flow)]
    assert len(flow.traced["adjustable"]) == ADJUSTABLE[model(flow)]


@pytest.mark.slow
def test_another_process_traces_the_same_bytes(flow):
    flow.again.text("trace", flow.job, "-o", "again.dag.qsync")
    digests = {hashlib.sha256((flow.folder / name).read_bytes()).hexdigest() for name in ("dag.qsync", "again.dag.qsync")}
    assert len(digests) == 1


def test_show_says_what_each_file_is(flow):
    kinds = {
        "dag.qsync": "PrecisionDag",
        "profile.qsync": "Profile",
        "observations.qsync": "Observations",
        "sensitivity.qsync": "Sensitivity",
        "plan.qsync": "PrecisionPlan",
    }
    for name, kind in kinds.items():
        shown = flow.planner.json("show", name)
        assert shown["kind"] == kind
        text = flow.planner.text("show", name)
        assert re.search(rf"kind\s+{kind}\b", text)
        assert shown["digest"] in text


def test_observe_says_why_it_stopped(flow):
    observed = flow.planner.json("show", "observations.qsync")["content"]
    assert observed["stopped"] == "budget"
    assert len(observed["iterations"]) == 3
    assert observed["batch_size"] == 2  # half of the job's


@pytest.mark.parametrize("indicator", ["hutchinson", "lossvar"])
def test_every_indicator_rates_every_operator(flow, indicator):
    arguments = ["observations.qsync", "--dag", "dag.qsync", "--indicator", indicator, "-o", f"{indicator}.qsync"]
    assert flow.planner.json("indicate", *arguments)["indicator"] == indicator
    rated = load(flow.folder / f"{indicator}.qsync", Sensitivity).omega.keys()  # hutchinson rates what chains keep, too
    adjustable = {operator.op_id for operator in load(flow.folder / "dag.qsync", PrecisionDag).adjustable}
    assert len(adjustable) == ADJUSTABLE[model(flow)]
    assert adjustable <= rated
    assert indicator == "hutchinson" or adjustable == rated


@pytest.fixture(scope="module")
def plans(flow):
    """By solver, the plan that it wrote twice, to ``SOLVER.qsync`` and ``SOLVER-again.qsync``."""
    found = {}
    for solver in ("greedy", "uniform", "full", "dynamic-batch"):
        for name in (solver, f"{solver}-again"):
            arguments = ("--sensitivity", "sensitivity.qsync", "--solver", solver, "-o", f"{name}.qsync")
            flow.planner.json("plan", *flow.planning, *arguments)
        found[solver] = load(flow.folder / f"{solver}.qsync", PrecisionPlan)
    return found


def test_every_solver_plans_within_its_limit_and_twice_the_same(flow, plans):
    for solver, plan in plans.items():
        files = [flow.folder / f"{name}.qsync" for name in (solver, f"{solver}-again")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert plan.solver == solver
        assert [len(group.assignments) for group in plan.groups] == [ADJUSTABLE[model(flow)]] * 2
    for solver in ("greedy", "uniform"):
        assert plans[solver].predicted_iteration_ns <= plans[solver].time_limit_ns
    assert {str(a.variant.compute) for g in plans["full"].groups for a in g.assignments.values()} == {"float32"}


def test_greedy_is_no_more_sensitive_than_uniform(plans):
    assert plans["greedy"].objective <= plans["uniform"].objective
    assert plans["greedy"].time_limit_ns == plans["uniform"].time_limit_ns


def test_explain_gives_a_reason_for_every_operator_and_for_one(flow):
    plan = load(flow.folder / "plan.qsync", PrecisionPlan)
    text = flow.planner.text("explain", "plan.qsync")
    data = json.dumps(flow.planner.json("explain", "plan.qsync"), ensure_ascii=False)
    for op_id, assignment in plan.group("infer").assignments.items():
        assert assignment.reason.strip()
        assert op_id.fqn in text
        assert json.dumps(assignment.reason, ensure_ascii=False)[1:-1] in data
    first = plan.operator_ids[0]
    assert first.fqn in flow.planner.text("explain", "plan.qsync", first.fqn)
    unknown = flow.planner.run("explain", "plan.qsync", "no.such.layer")
    assert unknown.returncode == 1
    assert "no.such.layer" in unknown.stderr


def test_diff_of_two_plans_names_operators_that_differ_and_none_for_equal_ones(flow, plans):
    uniform = plans["uniform"].group("infer").assignments
    changed = flow.planner.json("plan", "--diff", "full.qsync", "uniform.qsync")
    text = json.dumps(changed)
    assert all(str(op_id) in text for op_id, assignment in uniform.items() if assignment.variant.compute != "float32")
    same = flow.planner.text("plan", "--diff", "full.qsync", "full.qsync")
    assert not any(op_id.fqn in same for op_id in uniform)


def test_replay_predicts_what_the_plan_says_and_verify_finds_no_error_against_itself(flow):
    replayed = flow.planner.json("replay", "plan.qsync", *flow.planning, "-o", "predicted.qsync", "--perfetto", "trace.json")
    plan = load(flow.folder / "plan.qsync", PrecisionPlan)
    assert replayed["iteration_ns"] == plan.predicted_iteration_ns
    for group in plan.groups:
        assert replayed["groups"][group.group]["peak_bytes"] == group.predicted_peak_bytes
    predicted = load(flow.folder / "predicted.qsync", Timeline)
    trace = json.loads((flow.folder / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(predicted.intervals)

    save(attrs.evolve(predicted, source="measured"), flow.folder / "measured.qsync")
    verified = flow.planner.json("verify", "predicted.qsync", "measured.qsync")
    assert verified["iteration_ns"] == {"predicted": predicted.iteration_ns, "measured": predicted.iteration_ns, "error": 0.0}
    slower = attrs.evolve(predicted, source="measured", iteration_ns=2 * predicted.iteration_ns)
    save(slower, flow.folder / "slower.qsync")
    failed = flow.planner.run("verify", "predicted.qsync", "slower.qsync", "--max-error", 10)
    assert failed.returncode == 1
    assert "-50.0%" in failed.stderr


def test_backends_lists_who_can_run_what(flow):
    listed = flow.torch.json("backends", "dag.qsync")
    assert "aten" in {backend["name"] for backend in listed["backends"]}
    int8 = [entry for entry in listed["operators"] if entry["precision"] == "int8"]
    assert int8
    assert all("aten" in entry["backends"] for entry in int8)
    without_torch = flow.planner.json("backends", "dag.qsync")
    assert without_torch["backends"] == []


def test_a_plan_for_another_model_is_refused_by_the_names_that_differ(flow, other_dag):
    arguments = [str(other_dag) if argument == "dag.qsync" else argument for argument in flow.planning]
    refused = flow.planner.run("replay", "plan.qsync", *arguments)
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert re.search(r"conv1|layer1|encoder|features|classifier|bert|fc", refused.stderr)


def test_a_budget_that_nothing_fits_is_answered_with_the_smallest_that_would_do(flow):
    tight = (flow.folder / "cluster.toml").read_text().replace('role = "infer"', 'role = "infer"\nmemory = "1 KiB"')
    (flow.folder / "tight.toml").write_text(tight)
    arguments = [argument.replace("cluster.toml", "tight.toml") for argument in flow.planning]
    refused = flow.planner.run("plan", *arguments, "--sensitivity", "sensitivity.qsync", "-o", "tight.qsync")
    assert refused.returncode == 1
    assert re.search(r"infer.*[KM]iB", refused.stderr)
    assert not (flow.folder / "tight.qsync").exists()


def test_a_group_without_a_profile_is_named(flow):
    arguments = flow.planning[:-2]
    refused = flow.planner.run("plan", *arguments, "--sensitivity", "sensitivity.qsync", "-o", "none.qsync")
    assert refused.returncode == 1
    assert "group 'infer'" in refused.stderr
    assert "--profile infer=PATH" in refused.stderr
