"""Calls as text: every operator that a plan does not lower can be run again from what the graph stores."""

import functools
import json

import pytest
import torch
from torch.utils import _pytree as pytree

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_torch.load_job import load_job
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tracing.trace import trace

BERT = "layers=1,hidden=16,heads=2,vocab=50,seq=8"


@functools.cache
def traced(text: str) -> PrecisionDag:
    return trace(load_job(text, batch_size=2))


@pytest.mark.parametrize(
    "text",
    [
        "resnet18:image=32,width=4,classes=7",
        "vgg16:image=32,width=4,hidden=8,classes=7,pool_size=1",
        f"bert-base:{BERT}",
        f"bert-base:{BERT},attention=eager,head=mlm",
        f"roberta-base:{BERT}",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_call_runs_again_forward_and_backward(text: str, dtype: torch.dtype) -> None:
    dag = traced(text)
    checked = 0
    for operator in dag.operators:
        call = AtenCall.of(operator)
        if call is None:
            assert operator.is_adjustable or operator.kind == "input", operator.op_id
            continue
        fixed = operator.op_class is OpClass.FIXED
        inputs = call.make_inputs([torch.float32 if fixed else dtype] * len(operator.inputs))
        for tensor in inputs:
            tensor.requires_grad_()
        parameters = call.make_parameters()
        outputs = [leaf for leaf in pytree.tree_leaves(call.bind(inputs, parameters)()) if leaf.dtype.is_floating_point]
        assert tuple(outputs[0].shape) == operator.output_shape, operator.op_id
        if not fixed:
            assert outputs[0].dtype is dtype, operator.op_id
        if inputs:
            torch.autograd.backward(outputs[0], torch.ones_like(outputs[0]))
            assert all(tensor.grad.shape == tensor.shape for tensor in inputs)
        checked += 1
    assert checked > 15


def test_memory_layout_is_kept() -> None:
    dag = traced(f"bert-base:{BERT}")
    attention = next(o for o in dag.operators if o.kind == "scaled_dot_product_attention")
    inputs = AtenCall.of(attention).make_inputs([torch.float32] * 3)
    assert [tuple(tensor.shape) for tensor in inputs] == [(2, 2, 8, 8)] * 3
    assert {tensor.stride() for tensor in inputs} == {(128, 8, 16, 1)}  # heads are taken from the last dimension, not copied


def test_equal_calls_of_different_layers_cost_the_same() -> None:
    dag = trace(load_job("bert-base:layers=3,hidden=16,heads=2,vocab=50,seq=8", batch_size=2))
    norms = [o for o in dag.operators if o.kind == "layer_norm"]
    assert len(norms) == 7
    assert len({o.cost_key for o in norms}) == 1


def operator(call: dict, inputs: int = 1) -> Operator:
    return Operator(
        OpId("f"),
        "f",
        OpClass.DEPENDENT,
        tuple(OpId(f"i{k}") for k in range(inputs)),
        ((2, 3),) * inputs,
        (2, 3),
        attributes={"call": json.dumps(call)},
    )


def test_in_place_calls_may_be_given_leaves() -> None:
    call = AtenCall.of(operator({"op": "aten.mul_.Tensor", "args": [{"input": 0}, 2.0], "kwargs": {}}))
    x = torch.ones(2, 3, requires_grad=True)
    call.bind([x])().sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    assert torch.equal(x.detach(), torch.ones(2, 3))


def test_arguments_of_every_kind_are_decoded() -> None:
    text = {
        "op": "aten.to.dtype_layout",
        "args": [{"input": 0}],
        "kwargs": {"dtype": {"dtype": "float64"}, "device": {"device": ""}, "layout": {"layout": "strided"}, "pin_memory": False},
    }
    assert AtenCall.of(operator(text)).bind([torch.ones(2, 3)])().dtype is torch.float64
    masked = {
        "op": "aten.masked_fill.Scalar",
        "args": [{"input": 0}, {"tensor": [2, 3], "dtype": "bool"}, float("-inf")],
        "kwargs": {},
    }
    assert AtenCall.of(operator(masked)).bind([torch.ones(2, 3)])().max() == float("-inf")
    listed = {"op": "aten.cat.default", "args": [[{"input": 1}, {"input": 0}], 1], "kwargs": {}}
    result = AtenCall.of(operator(listed, inputs=2)).bind([torch.zeros(2, 3), torch.ones(2, 3)])()
    assert result[0].tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("dense", [True, False])
def test_expanded_tensors_are_made_dense_unless_asked_for_as_they_are(dense):
    mask = {"tensor": [2, 3], "dtype": "bool", "expanded": True} | ({} if dense else {"dense": False})
    text = {"op": "aten.masked_fill.Scalar", "args": [{"input": 0}, mask, 5.0], "kwargs": {}}
    bound = AtenCall.of(operator(text)).bind([torch.ones(2, 3)])
    assert bound.args[1].stride() == ((3, 1) if dense else (3, 0))
    assert torch.equal(bound(), torch.full((2, 3), 5.0))


def test_what_can_not_run_is_none() -> None:
    assert AtenCall.of(operator({"op": "aten.f.default", "args": [{"opaque": "Generator"}], "kwargs": {}})) is None
    assert AtenCall.of(operator({"op": "other.f.default", "args": [], "kwargs": {}})) is None
