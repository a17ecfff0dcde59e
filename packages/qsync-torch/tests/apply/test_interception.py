import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from qsync_core.ir.op_id import OpId
from qsync_torch import apply_
from qsync_torch.apply.functional_calls import WeightCalls
from qsync_torch.apply.interception import INDIFFERENT, Interception, is_indifferent, widest_dtype
from qsync_torch.operators.casts import CastCache
from qsync_torch.operators.norms import layer_norm

from .small_models import BFLOAT16, INT8, Attention, ConvNet, Functional, images, named

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def intercepted():
    return Interception(CastCache(), WeightCalls(()), promote=True)


def a(dtype, *shape):
    return torch.randn(shape or (4, 4)).to(dtype)


def augmented(x, y):
    x = x.clone()
    x += y
    return x


PRODUCTS = {
    "matmul": lambda x, y: torch.matmul(x, y),
    "operator": lambda x, y: x @ y,
    "mm": lambda x, y: x.mm(y),
    "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], x[None], y[None]),
    "addmm": lambda x, y: torch.addmm(y, x, y),
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]),
    "linear": lambda x, y: F.linear(x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "add": lambda x, y: x + y,
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "augmented add": lambda x, y: augmented(x, y),
}


@pytest.mark.parametrize(
    "dtypes, widest", [((HALF, BRAIN), FULL), ((BRAIN, FULL), FULL), ((FULL, HALF), FULL), ((HALF, HALF), HALF)]
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_mixed_operands_take_the_widest_format(name, dtypes, widest):
    x, y = (a(dtype) for dtype in dtypes)
    with intercepted():
        found = PRODUCTS[name](x, y)
    assert found.dtype is widest
    torch.testing.assert_close(found.float(), PRODUCTS[name](x.float(), y.float()), rtol=5e-3, atol=5e-3)


def test_zero_dimensional_numbers_and_integers_do_not_widen():
    assert widest_dtype([a(BRAIN), torch.tensor(1.0), torch.arange(3)]) is None
    assert widest_dtype([a(BRAIN), [a(HALF), (a(FULL),)]]) is FULL


def test_an_in_place_method_still_changes_its_tensor():
    x, y = torch.ones(3, dtype=BRAIN), torch.full((3,), 2.0)
    with intercepted():
        x.mul_(y)
        x.add_(y, alpha=2)
    assert x.dtype is BRAIN
    assert x.tolist() == [6.0, 6.0, 6.0]


def test_promotion_is_differentiable_and_gradients_come_back_in_each_format():
    x, y = a(BRAIN).requires_grad_(), a(FULL).requires_grad_()
    with intercepted():
        (x @ y).sum().backward()
    assert (x.grad.dtype, y.grad.dtype) == (BRAIN, FULL)


def test_writes_take_the_format_of_what_is_written_to():
    target, value = torch.zeros(4, 4), a(BRAIN, 2, 4)
    with intercepted():
        target[torch.tensor([True, False, True, False])] = value
    assert torch.equal(target[[0, 2]], value.float())


LOSSES = {
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "mse": lambda x: F.mse_loss(x, torch.zeros(4, 4)),
    "l1": lambda x: F.l1_loss(x, torch.zeros(4, 4)),
    "kl_div": lambda x: F.kl_div(F.log_softmax(x, 1), torch.full((4, 4), 0.25)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 4)),
    "nll": lambda x: F.nll_loss(F.log_softmax(x, 1), torch.arange(4)),
}


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_in_float32(name, dtype):
    x = a(dtype)
    with intercepted():
        loss = LOSSES[name](x)
    assert loss.dtype is FULL
    torch.testing.assert_close(loss, LOSSES[name](x.float()), rtol=2e-2, atol=2e-2)


def test_cross_entropy_of_bfloat16_logits_is_that_of_their_float32_values():
    x = a(BRAIN)
    with intercepted():
        loss = F.cross_entropy(x, torch.arange(4))
    assert torch.equal(loss, F.cross_entropy(x.float(), torch.arange(4)))


GUARDED = {
    "layer_norm": lambda d: nn.LayerNorm(64, device=d),
    "group_norm": lambda d: nn.GroupNorm(4, 64, device=d),
    "batch_norm": lambda d: nn.BatchNorm1d(64, device=d),
    "rms_norm": lambda d: nn.RMSNorm(64, device=d),
    "softmax": lambda d: nn.Softmax(dim=-1),
    "log_softmax": lambda d: nn.LogSoftmax(dim=-1),
}


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("name", GUARDED)
def test_guarded_operators_return_their_format_and_compute_in_float32(device, name, dtype):
    """One rounding to the output's format is all the error there is (two where a 16-bit weight is needed)."""
    module = GUARDED[name](device)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    # A large common offset: sums in 16 bit would lose the differences that the statistics are about.
    x = (torch.randn(128, 64, device=device) + 8).to(dtype).requires_grad_()
    with intercepted():
        y = module(x)
    wide = x.detach().float().requires_grad_()
    expected = module(wide)
    assert y.dtype is dtype
    unit = 2.0**-8 if dtype is BRAIN else 2.0**-11
    error = (y.float() - expected).abs() / expected.abs().clamp(min=expected.abs().mean())
    assert error.max().item() <= 3 * unit
    grad = torch.randn_like(expected)
    y.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).float())
    assert x.grad.dtype is dtype
    assert (x.grad.float() - wide.grad).norm() / wide.grad.norm() < 4 * unit
    assert all(parameter.grad.dtype is FULL for parameter in module.parameters())


def test_batch_norm_statistics_are_float32(device):
    norm = nn.BatchNorm2d(4, device=device)
    x = (torch.randn(64, 4, 8, 8, device=device) + 3).to(BRAIN)
    with intercepted():
        norm(x)
    assert norm.running_mean.dtype is FULL
    torch.testing.assert_close(norm.running_mean, 0.1 * x.float().mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * x.float().var((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_attention_with_operands_of_three_formats():
    model, x = Attention(), torch.randn(2, 5, 16)
    exact = model(x)
    apply_(model, named(q=INT8, v=BFLOAT16))
    y = model(x)
    assert y.dtype is FULL
    assert 0 < (y - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention_of_a_sixteen_bit_activation(training):
    model, x = Functional().train(training), torch.randn(2, 5, 8)
    exact = model(x)
    apply_(model, named(child=BFLOAT16), lower_eval=True)
    assert 0 < (model(x) - exact).norm() / exact.norm() < 0.03


def test_modules_outside_a_mapping_run_in_float32_on_sixteen_bit_activations():
    model, x = ConvNet().eval(), images()
    exact = model(x)
    apply_(model, named(conv1=BFLOAT16), lower_eval=True)
    assert 0 < (model(x) - exact).norm() / exact.norm() < 0.02


def test_recurrent_layers_take_sixteen_bit_activations():
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True))
    apply_(model, named(**{"0": BFLOAT16}))
    y, _ = model(torch.randn(2, 3, 4))
    assert y.dtype is FULL


ARGUMENTS = {
    **dict.fromkeys(["Embedding", "EmbeddingBag"], (8, 4)),
    **{f"{name}{n}d": (4,) for name in ("BatchNorm", "InstanceNorm") for n in (1, 2, 3)},
    **{f"{name}{n}d": (2,) for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool") for n in (1, 2, 3)},
    **{f"LPPool{n}d": (2, 2) for n in (1, 2)},
    **{f"ZeroPad{n}d": (1,) for n in (1, 2, 3)},
    **{f"ConstantPad{n}d": (1, 0.5) for n in (1, 2, 3)},
    "LayerNorm": (4,),
    "Unflatten": (1, (2, 2)),
    "Upsample": ((8, 8),),
    **dict.fromkeys(["PixelShuffle", "PixelUnshuffle", "ChannelShuffle"], (2,)),
    **dict.fromkeys(["Softmax", "LogSoftmax"], (1,)),
}
"""Constructor arguments of modules that need some."""


def dimensions(name):
    return int(name[-2]) + 2 if name[-2].isdigit() and name[-1] == "d" else 4


@pytest.mark.parametrize("cls", sorted(INDIFFERENT, key=lambda cls: cls.__name__))
def test_indifferent_modules_run_the_same_without_interception(cls, device):
    name = cls.__name__
    module = cls(*ARGUMENTS.get(name, ())).to(device)
    assert is_indifferent(module)
    x = torch.randn((4,) * dimensions(name), device=device).to(BRAIN)
    if name.startswith("Embedding"):
        x = torch.arange(4, device=device)[None]

    def run():
        torch.manual_seed(0)
        return module(x)

    with intercepted():
        inside = run()
    assert inside.dtype is (FULL if name.startswith("Embedding") else BRAIN)
    assert torch.equal(inside, layer_norm(module, x) if cls is nn.LayerNorm else run())


class Recording(TorchFunctionMode):
    """Remembers the names of the functions that reach it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Norms(nn.Module):
    """A planned operator and modules around it."""

    def __init__(self, inner_mode=None):
        super().__init__()
        self.fc, self.norm, self.drop, self.act = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.ReLU()
        self.mode = inner_mode

    def forward(self, x):
        y = self.act(self.drop(self.norm(self.fc(x))))
        if self.mode is None:
            return y @ x
        with self.mode:
            return self.act(y) @ x


@pytest.fixture
def intercepted_names(monkeypatch):
    """Names of the functions that interception is asked about."""
    seen, original = [], Interception.__torch_function__

    def record(self, func, types, args=(), kwargs=None):
        seen.append(func.__name__)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Interception, "__torch_function__", record)
    return seen


def test_indifferent_modules_are_not_intercepted_but_what_follows_is(intercepted_names):
    model = Norms()
    apply_(model, named(fc=BFLOAT16))
    assert model(torch.randn(4, 4)).dtype is FULL
    assert len(intercepted_names) == 1
    assert "matmul" in intercepted_names[0]


def test_modes_of_the_model_see_indifferent_modules():
    mode = Recording()
    model = Norms(mode)
    apply_(model, named(fc=BFLOAT16))
    model(torch.randn(4, 4))
    assert "relu" in mode.seen
    outer = Recording()
    with outer:
        model(torch.randn(4, 4))
    assert {"relu", "dropout", "layer_norm"} <= set(outer.seen)


class Failing(Norms):
    """An indifferent module raises, and the model goes on."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 2)

    def forward(self, x):
        with pytest.raises(IndexError):
            self.table(torch.tensor([5]))
        return super().forward(x)


def test_interception_is_back_after_an_indifferent_module_that_fails():
    model = Failing()
    apply_(model, named(fc=BFLOAT16))
    assert model(torch.randn(4, 4)).dtype is FULL


def test_a_forward_of_an_instances_own_is_intercepted():
    model = Norms()
    model.act.forward = lambda x: x @ torch.eye(4)
    apply_(model, named(fc=BFLOAT16))
    assert model(torch.randn(4, 4)).dtype is FULL


@pytest.mark.parametrize("variant", [INT8, BFLOAT16])
def test_functions_of_the_model_are_seen_and_those_of_its_operators_are_not(intercepted_names, variant):
    model = Norms()
    apply_(model, named(fc=variant))
    model(torch.randn(4, 4)).sum().backward()
    assert intercepted_names == ["matmul"]


def test_functional_calls_are_found_where_every_operator_gives_float32():
    model, x = Functional(), torch.randn(2, 5, 8)
    exact = model(x)
    applied = apply_(model, {OpId("weight"): INT8})
    found = model(x)
    applied.remove()
    assert 0 < (found - exact).norm() / exact.norm() < 0.05


class _Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.first(x)).abs() + torch.linalg.svdvals(self.first(x)).sum()


def test_functions_that_exist_in_float32_only_get_float32() -> None:
    """A layer in bfloat16 may stand before a Fourier transform or a decomposition."""
    torch.manual_seed(0)
    model, x = _Fourier(), torch.randn(4, 8)
    y = F.linear(x.bfloat16(), model.first.weight.bfloat16(), model.first.bias.bfloat16()).float()
    expected = torch.fft.rfft(y).abs() + torch.linalg.svdvals(y).sum()
    applied = apply_(model, {"first#0": "bfloat16", "first#1": "bfloat16"})
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    applied.remove()
