"""``apply_`` performs exactly the casts of core's table (``qsync_core.ir.semantics.casts``), forward and backward, and no
others."""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import casts, output_precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.aten import float_products
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

INT8_GRADIENTS = "int8;out=bfloat16;save=int8;gi=int8;gw=int8;x=tensor;w=channel;round=stochastic;sym=true"
VARIANTS = {"emb": "bfloat16", "q": "int8", "k": "int8", "v": "bfloat16", "out": "float16", "head": INT8_GRADIENTS}


class Mixed(nn.Module):
    """Widths are all different, so that the number of elements tells which tensor was cast."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(12, 16)
        self.q, self.k, self.v = nn.Linear(16, 20), nn.Linear(16, 20), nn.Linear(16, 28)
        self.norm = nn.LayerNorm(36)
        self.out, self.head = nn.Linear(28, 36), nn.Linear(36, 4)

    def forward(self, x):
        x = self.emb(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 4, dim=-1)
        return self.head(self.norm(torch.relu(self.out(weights @ v))))


class CastLog(TorchDispatchMode):
    """Every cast that reaches the dispatcher: from, to, elements."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.seen[args[0].dtype, result.dtype, result.numel()] += 1
        if func in (torch.ops.qsync.quantize.default, torch.ops.qsync.quantize.at):
            self.seen[args[0].dtype, result[0].dtype, result[0].numel()] += 1
        return result


def listed(dag, variants):
    """The casts of the table for every operator, shared ones once."""
    formats, shared, found = {}, set(), Counter()
    for operator in dag.operators:
        inputs = [formats[producer] for producer in operator.inputs]
        variant = variants.get(operator.op_id)
        for cast in casts(operator, variant, inputs):
            place = (operator.inputs[cast.input_index], cast.site, cast.key) if cast.shared else len(shared)
            if place not in shared:
                shared.add(place)
                found[getattr(torch, cast.key.source), getattr(torch, cast.key.target), cast.numel] += 1
        formats[operator.op_id] = output_precision(operator, variant, inputs)
    return found


def inside_operators(dag, variants):
    """What belongs to a float operator itself: bias and result in their formats, and the gradients of its parameters in float32."""
    found = Counter()
    for operator in dag.adjustable:
        compute, output = variants[operator.op_id].compute, variants[operator.op_id].output
        if not compute.needs_scale and compute is not Precision.FLOAT32:
            dtype, bias = getattr(torch, compute), operator.weight_shape[0]
            found[torch.float32, dtype, bias] += 1
            found[dtype, torch.float32, bias] += 1
            found[dtype, torch.float32, operator.weight_numel] += 1
            if output is not compute:
                found[dtype, getattr(torch, output), operator.output_numel] += 1
    return found


def test_the_casts_that_happen_are_those_of_the_table(monkeypatch):
    monkeypatch.setattr(float_products, "FORMATS_WITHOUT_HARDWARE", frozenset())  # whose products cast inside
    model = Mixed()

    def batch(step, batch_size):
        return Batch((torch.randn(batch_size, 6, 12),), {})

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    dag = trace(Job("mixed", model, batch, lambda y, _: y.square().mean(), optimizer, 3))
    variants = {operator.op_id: Variant.parse(VARIANTS[operator.op_id.fqn]) for operator in dag.adjustable}
    variants = OutputFormats.of(dag).decided(variants)
    assert {op_id.fqn for op_id, variant in variants.items() if variant.output is not Precision.FLOAT32} == {"emb", "q", "k", "v"}
    apply_(model, {op_id: Assignment(variant, "", "", "") for op_id, variant in variants.items()})
    with CastLog() as log:
        model(torch.randn(3, 6, 12)).square().mean().backward()
    assert log.seen == listed(dag, variants) + inside_operators(dag, variants)
