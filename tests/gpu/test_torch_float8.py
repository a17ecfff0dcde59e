"""float8_e4m3fn linear operators through ``torch._scaled_mm``: against float64, what they keep, and whole steps."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.ir.op_id import OpId  # noqa: E402
from qsync_core.ir.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402

FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN, rounding=Rounding.NEAREST, w_granularity=Granularity.PER_TENSOR)


@pytest.fixture(autouse=True)
def needs_float8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")


@pytest.mark.parametrize("w_granularity", [Granularity.PER_TENSOR, Granularity.PER_CHANNEL])
@pytest.mark.parametrize("output", [Precision.BFLOAT16, Precision.FLOAT32, Precision.FLOAT16])
@pytest.mark.parametrize("shape, n", [((128, 256), 64), ((3, 11, 72), 40), ((1, 16), 16), ((5, 7), 3), ((0, 32), 16)])
def test_output_and_gradients_equal_float64_of_the_dequantized_operands(shape, n, output, w_granularity):
    from qsync_torch.operators import linear
    from qsync_torch.quantize import quantize

    variant = attrs.evolve(FLOAT8, output=output, w_granularity=w_granularity)
    x, weight = torch.randn(shape, device="cuda", requires_grad=True), torch.randn(n, shape[-1], device="cuda", requires_grad=True)
    bias = torch.randn(n, device="cuda", requires_grad=True)
    y = linear(x, weight, bias, variant)
    grad = torch.randn_like(y)
    y.backward(grad)
    q_x, s_x = quantize(x.detach(), Precision.FLOAT8_E4M3FN)
    q_w, s_w = quantize(weight.detach(), Precision.FLOAT8_E4M3FN, w_granularity)
    x64, w64 = (q_x.double() * s_x.double()).requires_grad_(), (q_w.double() * s_w.double()[:, None]).requires_grad_()
    expected = torch.nn.functional.linear(x64, w64, bias.detach().double())
    expected.backward(grad.double())
    assert y.dtype is getattr(torch, str(output))
    rows = grad.double().flatten(0, -2)
    for found, wanted, size in (
        (y, expected, expected.norm()),
        (x.grad, x64.grad, x64.grad.norm()),
        (weight.grad, w64.grad, w64.grad.norm()),
        (bias.grad, rows.sum(0), rows.norm()),  # of what is added up: the sums of five numbers each may be near zero
    ):
        assert found.shape == wanted.shape
        assert (found.double() - wanted).norm().item() <= 1e-2 * size.item()


def test_only_float8_copies_are_kept():
    from qsync_torch.operators import linear

    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x, weight = torch.randn(32, 48, device="cuda", requires_grad=True), torch.randn(16, 48, device="cuda", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x, weight, None, FLOAT8)
    assert sum(t.nbytes for t in kept.values() if t.dtype is torch.float8_e4m3fn) == 32 * 48 + 16 * 48
    assert all(t.numel() == 1 for t in kept.values() if t.dtype is torch.float32)


def test_a_model_trains_in_float8():
    from qsync_torch import apply_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16)).cuda()
    x, target = torch.randn(256, 64, device="cuda"), torch.randint(16, (256,), device="cuda")
    variant = Variant.of(Precision.FLOAT8_E4M3FN, w_granularity=Granularity.PER_TENSOR)
    apply_(model, {OpId("0"): variant, OpId("2"): variant}, backend="aten")
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
