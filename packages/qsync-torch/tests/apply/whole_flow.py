"""Kinds of operators against references: each in all variants, and models of them traced, profiled, observed and applied."""

import copy

import attrs
import pytest
import torch

from qsync_core.ir import observations as terms
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, allocate
from qsync_planner.indicate import indicate
from qsync_planner.replayer.replay import Replayer
from qsync_torch.apply.apply import apply_
from qsync_torch.aten.float_products import FORMATS_WITHOUT_HARDWARE
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.job import Batch, Job
from qsync_torch.kernels.canary import float_products_of
from qsync_torch.kernels.exact_products import problem_of
from qsync_torch.kinds.table import OPERATOR_KINDS
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.montecarlo import MonteCarloCollector
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


def turned(weight, groups=1):
    """(C, O / groups, …) from (O, C / groups, …), group by group: a weight as PyTorch's transposed convolutions take it."""
    return torch.cat([part.transpose(0, 1) for part in weight.chunk(groups)])


def check_wrong_elements_are_found(call):
    """A wrong element of any product of a call in bfloat16 is found before it is measured."""
    products = list(float_products_of(call, BFLOAT16, torch.device("cpu")))
    assert {product.what for product in products} == {"output", "grad_input", "grad_weight"}
    for product in products:
        assert problem_of(product) == ""
        product.found.view(-1)[-1] += 8 * product.found.abs().max()
        assert "its errors are" in problem_of(product)


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


def check_flow_in_floats(model, shape, expected, function):
    """Trace, profile, observe, rate, plan and apply a kind without 8 bit: beside a linear, which has all formats.

    Args:
        model: in sequence; an operator of the kind is first, the linear last.
        shape: of an input, without the batch; its activations take more memory than the weights.
        expected: kind, shape of the weight as operators take it, and operations of both, by name.
        function: the kind's, of activation, weight and bias, with the first module's settings.
    """
    job = job_of(model, shape)
    dag = trace(job)
    assert {o.op_id.fqn: (o.kind, o.weight_shape, o.flops) for o in dag.adjustable} == expected
    stored = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {f"{o.op_id.fqn}.weight": o.parameter_shape for o in dag.adjustable}.items() <= stored.items()
    first, rows = (operator.op_id for operator in dag.adjustable)
    runs = {first: {BFLOAT16, FLOAT32}, rows: set(LADDER)}
    measured = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(QUICK, QUICK, QUICK)))
    assert {op_id: set(measured.cost_index[op_id]) for op_id in runs} == runs

    options = {"warmup": 0, "steps": 1, "settled": None}
    collector = MonteCarloCollector(draws=2)
    truth = observe(job, dag, ObserveRequest(LADDER, collectors=[collector], **options))
    found = {}
    for series in truth.series:
        if series.term == terms.FIRST_HALF:
            found.setdefault(series.op_id, set()).add(series.variant)
    # One more of all operators at once: in int8 it is the linear alone.
    assert found == {op_id: variants - {FLOAT32} for op_id, variants in (runs | {None: set(LADDER)}).items()}
    of_all, of_rows = (truth.values(terms.MONTECARLO, terms.FIRST_HALF, op_id, INT8) for op_id in (None, rows))
    assert of_all == of_rows
    # Nothing is drawn: both round to nearest.  The undisturbed pass, two operators and all in bfloat16, one and all in int8.
    assert collector.passes(dag, LADDER) == 1 + 3 + 2

    rated = observe(job, dag, ObserveRequest(LADDER, collectors=[LossVarCollector()], **options))
    sensitivity = indicate(rated, dag, LADDER, "lossvar")
    assert {op_id: set(by_variant) for op_id, by_variant in sensitivity.omega.items()} == runs

    # What products take beside their operands differs from CPU to CPU.
    costs = [attrs.evolve(cost, workspace_bytes=0, backward_workspace_bytes=0) for cost in measured.costs]
    lean = attrs.evolve(measured, costs=costs, steps=[])

    def within(nbytes):
        group = DeviceGroup("one", "cpu", 1, Role.INFER, Precision.FLOAT32, LADDER, memory_bytes=nbytes)
        return Inputs(dag, Cluster("one", (group,)), {"one": lean}, sensitivity)

    lowered_alone = {first: BFLOAT16, rows: FLOAT32}
    plan = allocate(within(Replayer(within(0)).memory("one", lowered_alone).peak_bytes))
    variants = {op_id: entry.variant for op_id, entry in plan.groups[0].assignments.items()}
    assert {op_id: variant.compute for op_id, variant in variants.items()} == {first: Precision.BFLOAT16, rows: Precision.FLOAT32}

    x = torch.randn(job.batch_size, *shape)
    planned = copy.deepcopy(model)
    applied = apply_(planned, plan)
    y = planned(x)
    y.sum().backward()
    half = function(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
    want = model[-1](model[1:-1](half.to(TORCH_DTYPE[variants[first].output])).float())
    assert torch.equal(y, want)
    (grad,) = torch.autograd.grad(want.sum(), model[0].weight)
    applied.remove()
    # Where a CPU has no instructions for the format, PyTorch's own gradient sums in 16 bit.
    allowed = 2.0**-8 if torch.bfloat16 in FORMATS_WITHOUT_HARDWARE else 0.0
    assert (planned[0].weight.grad - grad).norm() <= allowed * grad.norm()


def lowered_module(module, x):
    """A module's call in int8."""
    kind = next(kind for kind in OPERATOR_KINDS.values() if type(module) is kind.module)
    settings = {name: getattr(module, name) for name in kind.settings}
    return lowered(kind, x, module.weight, module.bias, INT8, **settings)
