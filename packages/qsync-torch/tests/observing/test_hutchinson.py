"""How the collector runs: in parts, leaving no trace, and where a model cannot be differentiated twice or is too large."""

import copy
import gc
import weakref

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nightly import nightly
from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing import hutchinson
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.collector import CollectorUnavailable, ObservedStep, StepCollector
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

from .asking import OnceSquare

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
BFLOAT16 = Variant.of(Precision.BFLOAT16)
FLOAT32 = Variant.of(Precision.FLOAT32)


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.twice = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(3, 16) / 4)

    def forward(self, x):
        y = F.gelu(self.conv(x)).mean(1).flatten(1)
        return F.linear(self.twice(torch.tanh(self.twice(y))), self.weight)


class Everything(Smooth):
    """Batch norm, dropout, a ReLU in place and max pooling besides."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        y = self.drop(y + F.max_pool2d(y, 3, 1, 1)).mean(1).flatten(1)
        return F.linear(self.twice(torch.tanh(self.twice(y))), self.weight)


class Once(Smooth):
    """A function of a third party with a first derivative only."""

    def forward(self, x):
        return OnceSquare.apply(super().forward(x))


class Distances(Smooth):
    """PyTorch has no derivative for the backward of cdist."""

    def forward(self, x):
        return torch.cdist(super().forward(x), torch.eye(3), p=1.5)


class EqualVectors(Smooth):
    """The distance of a vector to one that is equal: its gradient is 0 there, and its second derivative no number."""

    def forward(self, x):
        y = super().forward(x)
        return y + (y - y.detach()).norm(dim=1, keepdim=True).square()


def _batch(step, size):
    generator = torch.Generator().manual_seed(step)
    return Batch((torch.randn(size, 2, 4, 4, generator=generator),), target=torch.arange(size) % 3)


def _job(model, batch=_batch, loss=None, lr=0.1):
    loss = loss or (lambda output, batch: F.cross_entropy(output, batch.target))
    return Job("net", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=lr), batch_size=6)


def _step(model=None, update=0, seed=3, **job):
    torch.manual_seed(0)
    made = _job((model or Smooth)(), **job)
    return ObservedStep(made, copy.deepcopy(made.model).train(), trace(made), made.batch(update, 6), update, seed)


@pytest.mark.parametrize("parts", [3, 4, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_in_parts_gives_the_same(parts, reduction):
    step = _step(loss=lambda output, batch: F.cross_entropy(output, batch.target, reduction=reduction))
    whole, split = (HutchinsonCollector(n).collect_step(step, [BFLOAT16, INT8]) for n in (1, parts))
    assert whole.keys() == split.keys()
    for (op_id, variant, term), value in whole.items():
        if variant == BFLOAT16 or term == terms.GRADIENT:  # casts that have no scale
            assert split[op_id, variant, term] == pytest.approx(value, rel=0.02 if term == terms.GRADIENT else 1e-3)


def test_parts_of_one_scale_give_the_same_in_int8():
    """All samples are one sample, with different targets: every part has the scales of the whole."""
    step = _step(batch=lambda step, size: Batch((_batch(0, 1).args[0].expand(size, -1, -1, -1),), target=torch.arange(size) % 3))
    whole, split = (HutchinsonCollector(n).collect_step(step, [INT8]) for n in (1, 3))
    for (op_id, variant, term), value in whole.items():
        if term == terms.OPERANDS:
            assert split[op_id, variant, term] == pytest.approx(value, rel=1e-3)


def test_the_size_of_the_gradient_does_not_matter():
    """Squares of tiny gradients do not vanish in float32, those of huge ones do not overflow."""
    found = {}
    for exponent in (-50, 0, 50):
        step = _step(loss=lambda output, batch, e=exponent: F.cross_entropy(output, batch.target) * 2.0**e)
        found[exponent] = HutchinsonCollector().collect_step(step, [BFLOAT16])
    for key, value in found[0].items():
        for exponent in (-50, 50):
            assert found[exponent][key] == pytest.approx(value * 4.0**exponent, rel=0.02, abs=0)
    assert any(found[0].values())


def test_terms_of_each_variant():
    found = HutchinsonCollector().collect_step(_step(Everything), [INT8, BFLOAT16, FLOAT32])
    forward = {terms.OPERANDS, terms.OPERANDS_FLIPS, terms.OPERANDS_NOISE}
    output = {terms.OUTPUT, terms.OUTPUT_FLIPS, terms.OUTPUT_NOISE}
    for op_id in (OpId("conv"), OpId("twice", 0), OpId("twice", 1), OpId("weight")):
        assert {term for o, v, term in found if (o, v) == (op_id, INT8)} == forward | {terms.GRADIENT}
        assert {term for o, v, term in found if (o, v) == (op_id, BFLOAT16)} == forward | output | {terms.GRADIENT}
    assert FLOAT32 not in {variant for _, variant, _ in found}
    # Masks are behind the convolution only.
    assert found[OpId("conv"), INT8, terms.OPERANDS_FLIPS] > 0
    assert found[OpId("conv"), INT8, terms.OPERANDS_NOISE] > 0
    assert found[OpId("twice"), INT8, terms.OPERANDS_NOISE] == 0
    smooth = HutchinsonCollector().collect_step(_step(Smooth), [BFLOAT16])
    assert {term for _, _, term in smooth} == {terms.OPERANDS, terms.OUTPUT, terms.GRADIENT}


def test_functional_calls_count_as_modules_do():
    """Flooring shifts the calls of one module together, not those of one module's functions with weights of their own."""

    class Functions(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(16, 32) / 4), nn.Parameter(torch.randn(3, 16) / 4)

        def forward(self, x):
            return F.linear(torch.tanh(F.linear(x.flatten(1), self.first)), self.second)

    class Modules(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 16, bias=False), nn.Linear(16, 3, bias=False)
            self.first.weight.data, self.second.weight.data = torch.randn(16, 32) / 4, torch.randn(3, 16) / 4

        def forward(self, x):
            return self.second(torch.tanh(self.first(x.flatten(1))))

    found = []
    for kind in (Functions, Modules):
        step = _step(kind)
        with torch.no_grad():
            for index, parameter in enumerate(step.model.parameters()):
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) * (2.0 + index)).view_as(parameter) / 4)
        terms_of = HutchinsonCollector().collect_step(step, [attrs.evolve(INT8, rounding=Rounding.FLOOR)])
        names = {operator.op_id: index for index, operator in enumerate(step.dag.adjustable)}
        found.append({(names[op_id], term): value for (op_id, _, term), value in terms_of.items()})
    functions, modules = found
    assert functions == pytest.approx(modules, rel=1e-5)
    assert len(modules) == 4


@pytest.mark.parametrize("twice", [False, True])
def test_functions_that_share_a_bias_alone_are_apart(twice):
    """Each weight is lowered for itself, its calls together; in parts a bias belongs to the same calls as in one."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(32, 32) / 4), nn.Parameter(torch.randn(32, 32) / 4)
            self.bias = nn.Parameter(torch.randn(32))

        def forward(self, x):
            y = x.flatten(1)
            for weight in (self.first, self.second) * (2 if twice else 1):
                y = torch.tanh(F.linear(y, weight, self.bias))
            return y

    step = _step(Shared)
    whole, split = (HutchinsonCollector(parts).collect_step(step, [BFLOAT16]) for parts in (1, 2))
    assert len({op_id for op_id, _, _ in whole}) == (4 if twice else 2)
    for key, value in whole.items():
        assert split[key] == pytest.approx(value, rel=0.02 if key[-1] == terms.GRADIENT else 1e-3), key


@pytest.mark.parametrize("parts", [1, 2])
def test_variants_asked_together_get_what_each_gets_alone(parts):
    """They share casts; what depends on the rest of a variant they do not."""
    floored = attrs.evolve(INT8, rounding=Rounding.FLOOR)
    by_tensor = attrs.evolve(INT8, grad_input=Precision.INT8, w_granularity=Granularity.PER_TENSOR)
    weights_only = attrs.evolve(INT8, grad_input=Precision.FLOAT32)
    ladder = [INT8, BFLOAT16, Variant.of(Precision.FLOAT16), floored, by_tensor, weights_only]
    step = _step(Everything)
    together = HutchinsonCollector(parts).collect_step(step, ladder)
    alone = {}
    for variant in ladder:
        alone |= HutchinsonCollector(parts).collect_step(step, [variant])
    assert together.keys() == alone.keys()
    for key, value in alone.items():
        assert together[key] == pytest.approx(value, rel=1e-12), key


@pytest.mark.parametrize("parts", [1, 3])
def test_nothing_is_changed(parts):
    step = _step(Everything)
    for number, parameter in enumerate(step.model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    gradients = [parameter.grad for parameter in step.model.parameters()]
    before = copy.deepcopy(step.model.state_dict())
    forwards = [module.forward for module in step.model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in step.model.modules()]
    state = torch.random.get_rng_state()
    first = HutchinsonCollector(parts).collect_step(step, [INT8, BFLOAT16])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert [module.forward for module in step.model.modules()] == forwards
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in step.model.modules()] == hooks
    for number, (parameter, grad) in enumerate(zip(step.model.parameters(), gradients, strict=True)):
        assert parameter.grad is grad
        assert torch.equal(grad, torch.full_like(parameter, number))
    # The same masks and directions again.
    torch.manual_seed(99)
    assert HutchinsonCollector(parts).collect_step(step, [INT8, BFLOAT16]) == first
    other = HutchinsonCollector(parts).collect_step(attrs.evolve(step, seed=4), [INT8, BFLOAT16])
    assert other != first


@pytest.mark.parametrize(("model", "parts"), [(Everything, 2), (Once, 1), *nightly((Everything, 1))])
def test_nothing_stays_alive(model, parts, monkeypatch):
    step = _step(model)
    graphs = []

    class Watched(hutchinson.NoiseResponse):
        def __init__(self, *args):
            super().__init__(*args)
            graphs.append(weakref.ref(self))

    monkeypatch.setattr(hutchinson, "NoiseResponse", Watched)

    def alive():
        try:
            HutchinsonCollector(parts).collect_step(step, [INT8, BFLOAT16])
        except CollectorUnavailable:
            assert model is Once
        # PyTorch keeps the graph of a backward pass that failed until the next one.
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    counts = [alive() for _ in range(4)]
    # What earlier tests left behind may go away meanwhile; nothing may be added.
    assert counts == sorted(counts, reverse=True)
    assert len(graphs) == len(counts) * parts
    assert [graph() for graph in graphs] == [None] * len(graphs)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Once, r"once_differentiable"),
        (Distances, r"derivative for .*_cdist_backward.* is not implemented"),
        (EqualVectors, r"second derivatives of net are not finite at update 0, as where it has the distance of two equal vectors"),
    ],
)
def test_without_a_second_derivative(model, reason):
    with pytest.raises(CollectorUnavailable, match=reason):
        HutchinsonCollector().collect_step(_step(model), [INT8])
    torch.manual_seed(0)
    job, said = _job(model()), []
    dag = trace(job)
    collectors = [HutchinsonCollector(), LossVarCollector()]
    found = observe(job, dag, ObserveRequest([INT8], warmup=0, steps=2, collectors=collectors), announce=said.append)
    assert {series.collector for series in found.series} == {terms.LOSSVAR, "run"}
    assert len(found.iterations) == 2
    why = found.settings["without hutchinson"]
    assert f"without hutchinson: {why}; observing goes on with lossvar" in said
    with pytest.raises(ObservationError, match=f"collector hutchinson cannot observe net: .*{reason}"):
        observe(job, dag, ObserveRequest([INT8], warmup=0, steps=2, collectors=[HutchinsonCollector()]))


def test_other_errors_are_not_swallowed():
    step = _step()
    broken = attrs.evolve(step, batch=Batch((torch.randn(6, 3, 4, 4),), target=step.batch.target))
    with pytest.raises(RuntimeError, match="channels"):
        HutchinsonCollector().collect_step(broken, [INT8])


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite(loss):
    step = _step(loss=lambda output, batch: F.cross_entropy(output, batch.target) * loss, update=7)
    with pytest.raises(ObservationError, match="the gradient of net is not finite at update 7; train with a smaller learning rate"):
        HutchinsonCollector().collect_step(step, [INT8])


def test_out_of_memory_halves_the_parts(monkeypatch):
    step, tried = _step(), []
    run = hutchinson._Pass.run

    def small(self, parts):
        tried.append(parts)
        if parts < 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")
        return run(self, parts)

    monkeypatch.setattr(hutchinson._Pass, "run", small)
    collector = HutchinsonCollector()
    assert isinstance(collector, StepCollector)
    found = collector.collect_step(step, [BFLOAT16])
    assert (tried, collector.parts) == ([1, 2, 4], 4)
    assert all(value >= 0 for value in found.values())
    # The next step begins with what fitted.
    collector.collect_step(step, [BFLOAT16])
    assert tried == [1, 2, 4, 4]


def test_one_sample_that_does_not_fit(monkeypatch):
    tried = []

    def never(self, parts):
        tried.append(parts)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr(hutchinson._Pass, "run", never)
    expected = r"^one sample at a time does not fit in memory: CUDA out of memory. Tried to allocate 20.00 MiB.$"
    with pytest.raises(CollectorUnavailable, match=expected):
        HutchinsonCollector().collect_step(_step(), [INT8])
    assert tried == [1, 2, 4, 6]
