"""The example as its user meets it: found by the command line, chosen by name in a plan, refused where it is missing."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from qsync_core.errors import BackendError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_


def plan_for(backend):
    variant = Variant.parse("int8")
    assignments = {OpId("0"): Assignment(variant, backend, "", "asked for by name")}
    group = GroupPlan("infer", Role.INFER, 1, DeviceType("cpu", DeviceKind.CPU), Precision.FLOAT32, assignments)
    return PrecisionPlan(
        model="small",
        dag_digest="",
        operator_ids=(OpId("0"),),
        input_digests={},
        solver="greedy",
        indicator="lossvar",
        time_limit_ns=1,
        predicted_iteration_ns=1,
        objective=0.0,
        bound=None,
        groups=(group,),
        rank0_group="infer",
    )


def step(backend):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 8)), torch.randn(6, 24)
    apply_(model, plan_for(backend), group="infer")
    y = model(x)
    y.square().sum().backward()
    return y.detach(), model[0].weight.grad


def test_the_command_line_lists_it():
    result = subprocess.run(
        [sys.executable, "-m", "qsync_core.cli", "backends", "--json"], capture_output=True, text=True, check=True
    )
    offered = {backend["name"]: backend for backend in json.loads(result.stdout)["backends"]}
    assert [spec["op"] for spec in offered["example"]["kernels"]] == ["linear.output", "activation.output", "activation.grad_input"]


def test_a_plan_that_names_it_runs_on_it(monkeypatch):
    from qsync_kernels_example import product

    asked = []
    build = product.build_product
    monkeypatch.setattr(product, "build_product", lambda rows: asked.append(rows) or build(rows))
    found, expected = step("example+aten"), step("aten")
    assert asked == [1024]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=2e-2)  # computed in bfloat16


def test_alone_it_refuses_what_it_does_not_offer():
    with pytest.raises(BackendError, match=r"it offers linear\.output, activation\.output, activation\.grad_input only"):
        step("example")
