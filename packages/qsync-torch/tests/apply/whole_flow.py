"""Kinds of operators against references: each in all variants, and models of them traced, profiled, observed and applied."""

import copy

import pytest
import torch

from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.kinds.table import OPERATOR_KINDS
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.operators import lowered
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

from .operator_reference import check_operator

INT8 = Variant.of(Precision.INT8, rounding=Rounding.NEAREST, output=Precision.FLOAT32)
BFLOAT16, FLOAT32 = Variant.of(Precision.BFLOAT16), Variant.plain(Precision.FLOAT32)
LADDER = (INT8, BFLOAT16, FLOAT32)
QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)


def check_kind(name, variant, x, weight, bias, turn=lambda weight: weight, **geometry):
    """One call and its gradients in a variant, against float64.

    Args:
        name: of the kind.
        variant: how it runs.
        x, bias: as its function takes them.
        weight: output channels first; ``turn`` makes of it what the function takes.
        geometry: the function's other arguments.
    """
    kind = OPERATOR_KINDS[name]
    return check_operator(
        lambda x, w, b: lowered(kind, x, turn(w), b, variant, **geometry),
        lambda x, w, b: kind.function(x, turn(w), b, **geometry),
        x,
        weight,
        bias,
        variant,
    )


def job_of(model, shape):
    """A job that brings the means of a model's outputs to 1."""

    def batch(step, size):
        x = torch.randn(size, *shape, generator=torch.Generator().manual_seed(step))
        return Batch((x,), target=torch.ones(size))

    def loss(output, batch):
        return (output.square().flatten(1).mean(1) - batch.target).square().mean()

    return Job("kinds", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, 0.01), batch_size=4)


def observed(model, shape):
    """What two collectors find of a model, by collector and term; operators by their place, variants by their label."""
    job = job_of(model, shape)
    dag = trace(job)
    places = {operator.op_id: place for place, operator in enumerate(dag.adjustable)}
    collectors = (HutchinsonCollector(), LossVarCollector())
    found = observe(job, dag, ObserveRequest(LADDER, warmup=0, steps=2, collectors=collectors, settled=None))
    return {
        (series.collector, series.term, places.get(series.op_id), series.variant and series.variant.label): series.values
        for series in found.series
    }


def check_flow(model, shape, expected, twin):
    """Trace, profile, observe and apply.

    Args:
        model: in sequence; its operators are lowered to int8 one by one.
        shape: of an input, without the batch.
        expected: kind, shape of the weight as operators take it, and operations of every operator, by name.
        twin: the same function, its operators of kinds that are checked elsewhere.
    """
    job = job_of(model, shape)
    dag = trace(job)
    assert {o.op_id.fqn: (o.kind, o.weight_shape, o.flops) for o in dag.adjustable} == expected
    stored = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {f"{o.op_id.fqn}.weight": o.parameter_shape for o in dag.adjustable}.items() <= stored.items()
    measured = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(QUICK, QUICK, QUICK)))
    for operator in dag.adjustable:
        costs = {variant: measured.costs[place] for variant, place in measured.cost_index[operator.op_id].items()}
        assert set(costs) == set(LADDER)
        assert costs[INT8].saved_own_bytes > 0
    own, other = observed(model, shape), observed(twin, shape)
    assert own.keys() == other.keys()
    assert {"hutchinson", "lossvar"} <= {key[0] for key in own}
    for key, values in own.items():
        assert values == pytest.approx(other[key], rel=2e-4), key
    x = torch.randn(2, *shape)
    for name in expected:
        planned = copy.deepcopy(model)
        applied = apply_(planned, {f"{name}#0": INT8})
        y = planned(x)
        y.sum().backward()
        want = x
        for place, part in enumerate(model):
            want = lowered_module(part, want) if str(place) == name else part(want)
        assert torch.equal(y, want)
        (grad,) = torch.autograd.grad(want.sum(), model.get_parameter(f"{name}.weight"))
        applied.remove()
        assert torch.equal(planned.get_parameter(f"{name}.weight").grad, grad)


def lowered_module(module, x):
    """A module's call in int8."""
    kind = next(kind for kind in OPERATOR_KINDS.values() if type(module) is kind.module)
    settings = {name: getattr(module, name) for name in kind.settings}
    return lowered(kind, x, module.weight, module.bias, INT8, **settings)
