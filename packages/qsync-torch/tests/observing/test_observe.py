import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import ObservationError
from qsync_core.geometry import Geometry
from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.call_hooks import GradientCapture, hooked_calls
from qsync_torch.observing.closed_form import LossVarCollector
from qsync_torch.observing.collector import OperatorCall
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.record import SettledRule
from qsync_torch.observing.rounding_noise import element_variance
from qsync_torch.tracing.trace import trace

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
BFLOAT16 = Variant.of(Precision.BFLOAT16)
FLOAT32 = Variant.of(Precision.FLOAT32)
LADDER = (INT8, BFLOAT16, FLOAT32)


class Net(nn.Module):
    """A strided grouped convolution, an in-place ReLU behind it, a module called twice and a functional linear."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.twice = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(5, 16) / 4)

    def forward(self, x):
        y = F.relu(self.conv(x), inplace=True).flatten(1)[:, :16]
        y = self.twice(torch.tanh(self.twice(y)))
        return F.linear(y, self.weight)


def _batch(step, size):
    generator = torch.Generator().manual_seed(step)
    return Batch((torch.randn(size, 4, 6, 6, generator=generator),), target=torch.arange(size) % 5)


def _job(lr=0.1, model=None, loss=None):
    torch.manual_seed(0)
    return Job(
        "net",
        model or Net(),
        _batch,
        loss or (lambda output, batch: F.cross_entropy(output, batch.target)),
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch_size=6,
    )


def _observe(job, **options):
    options = {"warmup": 0, "steps": 2, "collectors": [LossVarCollector()], **options}
    return observe(job, trace(job), ObserveRequest(LADDER, **options))


def test_lossvar_against_autograd_of_the_whole_model():
    """∂L/∂(copy of an operand) from autograd on the model written out by hand, in float64."""
    job = _job()
    found = _observe(job, steps=1, batch_size=6)
    net, batch = job.model.double(), _batch(0, 6)
    x = batch.args[0].double().requires_grad_()
    weights = [
        net.conv.weight.detach().clone().requires_grad_(),
        *(net.twice.weight.detach().clone().requires_grad_() for _ in "ab"),
    ]
    y = torch.relu(F.conv2d(x, weights[0], net.conv.bias, 2, 1, 1, 2)).flatten(1)[:, :16].detach().requires_grad_()
    first = F.linear(y, weights[1], net.twice.bias)
    second_in = torch.tanh(first).detach().requires_grad_()
    output = F.linear(F.linear(second_in, weights[2], net.twice.bias), net.weight)
    F.cross_entropy(output, batch.target).backward()
    for op_id, operand, weight in ((OpId("twice", 1), second_in, weights[2]),):
        for variant in (INT8, BFLOAT16):
            args = variant.compute, Granularity.PER_TENSOR, variant.rounding
            expected = (element_variance(operand.detach().float(), *args).double() * operand.grad.square()).sum()
            assert found.values(terms.LOSSVAR, terms.X_VAR_GRAD, op_id, variant)[0] == pytest.approx(float(expected), rel=1e-3)
            args = variant.compute, variant.w_granularity, variant.rounding
            expected = (element_variance(weight.detach().float(), *args).double() * weight.grad.square()).sum()
            assert found.values(terms.LOSSVAR, terms.W_VAR_GRAD, op_id, variant)[0] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_a_call_are_autograds(groups):
    x = torch.randn(2, 4, 7, 7, requires_grad=True)
    weight = torch.randn(6, 4 // groups, 3, 3, requires_grad=True)
    grad_output = torch.randn(2, 6, 3, 3)
    geometry = {"stride": (2, 2), "padding": (1, 1), "dilation": (2, 2), "groups": groups}
    expected = torch.autograd.grad(F.conv2d(x, weight, None, *geometry.values()), [x, weight], grad_output)
    call = OperatorCall(None, x.detach(), weight.detach(), None, grad_output, Geometry(**geometry))
    assert torch.allclose(call.grad_x, expected[0], atol=1e-5)
    assert torch.allclose(call.grad_weight, expected[1], atol=1e-4)


def test_gradients_of_the_calls_of_a_module_add_up_to_its_parameters():
    job = _job()
    dag = trace(job)
    capture = GradientCapture(dag.adjustable)
    with hooked_calls(job.model, dag.adjustable, capture):
        job.compute_loss(_batch(0, 6)).backward()
        calls = {call.operator.op_id: call for call in capture.calls()}
        both = calls[OpId("twice", 0)].grad_weight + calls[OpId("twice", 1)].grad_weight
    assert set(calls) == {operator.op_id for operator in dag.adjustable}
    assert torch.allclose(both, job.model.twice.weight.grad, atol=1e-6)
    assert torch.allclose(calls[OpId("conv")].grad_weight, job.model.conv.weight.grad, atol=1e-6)
    assert torch.allclose(calls[OpId("weight")].grad_weight, job.model.weight.grad, atol=1e-6)


def test_the_output_is_the_one_before_it_was_overwritten_in_place():
    job = _job()
    dag = trace(job)
    capture = GradientCapture(dag.adjustable)
    with hooked_calls(job.model, dag.adjustable, capture):
        job.compute_loss(_batch(0, 6)).backward()
        conv = next(call for call in capture.calls() if call.operator.op_id == OpId("conv"))
        assert float(conv.output.min()) < 0
        assert torch.allclose(conv.output, job.model.conv(_batch(0, 6).args[0]))


def test_the_model_is_left_as_it_was():
    job = _job()
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    _observe(job)
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in job.model.modules())


def test_updates_are_real_and_half_batches():
    found = _observe(_job(lr=0.5), steps=4)
    losses = found.values("run", "loss")
    assert found.batch_size == 3
    assert len(set(losses)) == 4
    noise = found.values(terms.LOSSVAR, terms.W_VAR_GRAD, OpId("twice"), INT8)
    assert len(set(noise)) == 4


def test_the_norm_of_every_updates_gradient_is_recorded():
    """Of what trained the model at that update, against SGD by hand."""
    found = _observe(_job(lr=0.5), warmup=1, steps=3)
    norms, model = found.values(terms.RUN, terms.GRADIENT_SQ_NORM), _job().model
    for step in range(4):
        loss = F.cross_entropy(model(_batch(step, 3).args[0]), _batch(step, 3).target)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        if step:
            assert norms[step - 1] == pytest.approx(sum(float(g.double().square().sum()) for g in gradients), rel=1e-4)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient


def test_float32_has_no_terms_and_16_bit_outputs_have_a_third():
    found = _observe(_job(), steps=1)
    written = {(series.variant, series.term) for series in found.series if series.collector == terms.LOSSVAR}
    assert written == {
        (INT8, terms.X_VAR_GRAD),
        (INT8, terms.W_VAR_GRAD),
        (BFLOAT16, terms.X_VAR_GRAD),
        (BFLOAT16, terms.W_VAR_GRAD),
        (BFLOAT16, terms.Y_VAR_GRAD),
    }


def test_rounding_of_a_floored_variant_counts_its_mean_error():
    floor = attrs.evolve(INT8, rounding=Rounding.FLOOR)
    nearest = attrs.evolve(INT8, rounding=Rounding.NEAREST)
    job = _job()
    found = observe(job, trace(job), ObserveRequest((floor, nearest), steps=1, collectors=[LossVarCollector()]))
    for term in (terms.X_VAR_GRAD, terms.W_VAR_GRAD):
        by_floor, by_nearest = (found.values(terms.LOSSVAR, term, OpId("conv"), variant)[0] for variant in (floor, nearest))
        # s²/3 against squared errors, s²/12 on average.
        assert by_floor == pytest.approx(4 * by_nearest, rel=0.3)


def test_same_seed_same_numbers():
    assert _observe(_job(), seed=3).series == _observe(_job(), seed=3).series


def test_stops_when_settled_and_says_so():
    found = _observe(_job(lr=0.0), steps=40, settled=SettledRule(warmup=1, window=1, quiet_windows=1, running=-1, window_alone=-1))
    assert len(found.iterations) == 3
    assert found.stopped.startswith("settled: ")
    assert _observe(_job(), steps=3, settled=None).stopped == "budget"


def test_a_collector_of_a_third_party():
    class Peak:
        name = "peak"

        def collect(self, call, variants):
            return {(None, "x"): call.x.abs().max()}

    found = _observe(_job(), steps=1, collectors=[Peak()])
    assert found.values("peak", "x", OpId("conv"))[0] == pytest.approx(float(_batch(0, 3).args[0].abs().max()))


def test_installed_collectors_come_from_the_hook():
    found = observe(job := _job(), trace(job), ObserveRequest(LADDER, steps=1))
    assert {series.collector for series in found.series} == {terms.RUN, terms.HUTCHINSON, terms.LOSSVAR}


def test_infinite_activation_names_operator_and_term():
    class Blown(Net):
        def forward(self, x):
            # Infinite only in what the convolution reads: its output is replaced, so that the loss stays finite.
            blown = torch.where(torch.isfinite(y := self.conv(x * float("inf"))), y, y.detach().nan_to_num(0, 0, 0))
            return super().forward(x) + 0 * blown.nan_to_num(0, 0, 0).sum()

    job = _job(model=Blown())
    with pytest.raises(ObservationError, match=r"lossvar\.\w+.* of operator conv#\d is (nan|inf).* at update 0 of net"):
        _observe(job)


def test_infinite_loss_names_the_update():
    with pytest.raises(ObservationError, match=r"the loss of net is (nan|inf) at update \d+; train with a smaller learning rate"):
        _observe(_job(lr=1e30), steps=10)


def test_a_model_without_gradients_is_refused():
    job = _job(loss=lambda output, batch: output.detach().sum().requires_grad_())
    with pytest.raises(
        ObservationError, match=r"no gradient reached .*any other linear or convolution operator of net.*is it trained"
    ):
        observe(job, trace(_job()), ObserveRequest(LADDER, steps=1, collectors=[LossVarCollector()]))


def test_an_operator_that_runs_only_sometimes_is_refused():
    class Sometimes(Net):
        step = 0

        def forward(self, x):
            Sometimes.step += 1
            return super().forward(x) if Sometimes.step != 2 else F.linear(F.relu(self.conv(x)).flatten(1)[:, :16], self.weight)

    job = _job(model=Sometimes())
    dag = trace(_job())
    expected = r"of operator twice#0 of net was seen in some updates only \(first difference at update 1\)"
    with pytest.raises(ObservationError, match=expected):
        observe(job, dag, ObserveRequest(LADDER, warmup=0, steps=3, collectors=[LossVarCollector()]))
