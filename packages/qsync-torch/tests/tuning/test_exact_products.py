"""Products compared with exact ones: right results of every geometry pass, faults of every kind are found."""

import attrs
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import CallShapes
from qsync_torch.kernels import exact_products
from qsync_torch.kernels.canary import float_products_of
from qsync_torch.kernels.exact_attention import attention_problem, batched_problem
from qsync_torch.kernels.exact_products import SIGMAS, STEPS, Factor, Product, allowed_error, problem_of

CPU = torch.device("cpu")


def _linear(m, k, n):
    return CallShapes("linear", (m, k), (n, k), (m, n))


def _conv(channels, outputs, kernel, side, images=3, **geometry):
    g = Geometry(**geometry)
    y = (images, outputs, *g.output_size((side, side), (kernel, kernel)))
    return CallShapes("conv2d", (images, channels, side, side), (outputs, channels // g.groups, kernel, kernel), y, g)


CALLS = {
    "linear": _linear(300, 70, 130),
    "wide": _linear(40, 96, 1024),
    "3x3": _conv(8, 16, 3, 14, padding=(1, 1)),
    "strided": _conv(8, 16, 3, 15, stride=(2, 2), padding=(1, 1)),
    "1x1 strided": _conv(16, 24, 1, 9, stride=(2, 2)),
    "depthwise": _conv(12, 12, 7, 11, padding=(3, 3), groups=12),
    "groups and dilation": _conv(12, 24, 3, 13, padding=(2, 2), dilation=(2, 2), groups=4),
    "more images and channels than are summed": _conv(20, 24, 3, 6, images=20, padding=(1, 1)),
    "one pixel": _conv(40, 10, 3, 1, padding=(1, 1)),
}
FORMATS = (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16)


def _products(call, precision):
    torch.manual_seed(0)
    return list(float_products_of(call, Variant.of(precision), CPU))


@pytest.mark.parametrize("precision", FORMATS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_a_right_library_computes_passes(name, precision):
    found = {product.what: problem_of(product, seed) for product in _products(CALLS[name], precision) for seed in range(3)}
    assert found == {"output": "", "grad_weight": "", "grad_input": ""}


def _one_nan(y):
    y.view(-1)[y.numel() // 3] = float("nan")


def _garbage(y):
    y.view(-1)[y.numel() // 2] = 1e18 if y.dtype is not torch.float16 else 6e4


def _last_row(y):
    y[-1].zero_()


def _tile(y):
    flat = y.view(y.shape[0], -1)
    part = flat[: len(flat) // 2, : flat.shape[1] // 2]
    part.copy_(part.flip(0, 1).clone())


@pytest.mark.parametrize("fault", [_one_nan, _garbage, _last_row, _tile])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_is_found_wherever_it_is(name, fault):
    for precision in FORMATS:
        for product in _products(CALLS[name], precision):
            bad = product.found.clone(memory_format=torch.contiguous_format)
            fault(bad)
            said = problem_of(attrs.evolve(product, found=bad))
            assert ("not finite" if fault is _one_nan else "of its numbers") in said, (precision, product.what)


class _Written(TorchDispatchMode):
    """Counts the numbers that operations write, of all and of the largest result, those of views left out."""

    numbers = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not function.is_view:
            self.numbers += found.numel()
            self.largest = max(self.largest, found.numel())
        return found


def test_a_filter_of_many_places_is_checked_in_a_few_passes():
    for product in _products(_conv(32, 32, 5, 16, images=32, padding=(2, 2)), Precision.BFLOAT16):
        with _Written() as written:
            assert problem_of(product) == ""
        # The filter has 25 places.
        assert written.numbers < 6 * (product.first.values.numel() + product.second.values.numel() + product.found.numel())


def test_a_filter_of_very_many_places_takes_no_more_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(exact_products, "_CHUNK", 1 << 19)
    for product in _products(_conv(8, 8, 15, 12, images=64, padding=(7, 7), groups=8), Precision.FLOAT32):
        with _Written() as written:
            assert problem_of(product) == ""
        assert written.largest <= 1 << 19


@pytest.mark.parametrize("name", CALLS)
def test_the_length_of_a_sum_is_that_of_the_product(name):
    call = CALLS[name]
    ones = {product.what: product for product in _products(call, Precision.FLOAT32)}
    for operand in {id(f.values): f.values for product in ones.values() for f in (product.first, product.second)}.values():
        operand.fill_(1.0)
    x, w, grad = ones["grad_weight"].second.values, ones["output"].second.values, ones["grad_weight"].first.values
    x, w = x.requires_grad_(), w.requires_grad_()
    if call.of_rows:
        y = torch.nn.functional.linear(x, w)
    else:
        g = call.geometry
        y = torch.nn.functional.conv2d(x, w, None, g.stride, g.padding, g.dilation, g.groups)
    of_x, of_w = torch.autograd.grad(y, (x, w), grad)
    longest = {"output": y, "grad_input": of_x, "grad_weight": of_w}
    whole = call.of_rows or name == "1x1 strided"  # elsewhere a border leaves products out
    for what, product in ones.items():
        most = int(longest[what].max())
        assert most == product.length if whole else most <= product.length, what


def _cut_off(x, bits):
    """Leave out, in place, all but so many bits of the fractions of float64 numbers."""
    np.bitwise_and(x.view(np.int64), np.int64(-1 << (52 - bits)), out=x.view(np.int64))


def _on_tensor_cores(grad, x):
    """A gradient of a weight as TF32's tensor cores make it at worst: operands are cut off after 10 bits, and four products at a
    time are added to one sum, which is cut off after 23."""
    grad, x = (operand.double().numpy() for operand in (grad, x))
    _cut_off(grad, 10)
    _cut_off(x, 10)
    fours = np.matmul(grad.reshape(-1, 4, grad.shape[1]).swapaxes(1, 2), x.reshape(-1, 4, x.shape[1]))
    total = np.zeros(fours.shape[1:])
    for each in fours:
        np.add(total, each, out=total)
        _cut_off(total, 23)
    return torch.from_numpy(total).float()


def test_what_long_sums_lose_on_tensor_cores_is_no_fault():
    torch.manual_seed(0)
    grad, x = torch.randn(400_000, 8), torch.randn(400_000, 12)
    product = Product("grad_weight", Factor(grad), Factor(x), _on_tensor_cores(grad, x), STEPS[torch.float32])
    exact = grad.double().t() @ x.double()
    lost = float((product.found - exact).norm() / exact.norm())
    assert lost > product.step  # which is all that its formats explain
    assert [problem_of(product, seed) for seed in range(8)] == [""] * 8
    for fault in (_one_nan, _garbage, _last_row, _tile, lambda y: y.mul_(0.9), lambda y: y[:, -1:].mul_(-1)):
        bad = product.found.clone()
        fault(bad)
        assert problem_of(attrs.evolve(product, found=bad)), fault


def test_no_length_explains_a_third():
    assert SIGMAS * allowed_error(STEPS[torch.bfloat16], 1 << 40) < 1 / 3


def test_the_sentence_counts_what_is_not_finite():
    product = _products(CALLS["linear"], Precision.BFLOAT16)[0]
    product.found[5, :7] = float("inf")
    assert problem_of(product) == f"7 of its {300 * 130} elements are not finite"


def test_products_of_activations():
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 20, 33), torch.randn(2, 3, 33, 40)
    y = a @ b
    assert batched_problem(a, b, y) == ""
    y[1, 2, 19] = 0
    assert "of its numbers" in batched_problem(a, b, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_and_its_gradients(causal, heads):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 24, 16, requires_grad=True) for n in (4, heads, heads))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads < 4)
    grad = torch.randn_like(y)
    grads = torch.autograd.grad(y, (q, k, v), grad)
    operands = [x.detach() for x in (q, k, v)]

    def problem(found, written):
        return attention_problem(operands, found, grad, written, None, causal, None)

    assert problem(y.detach(), grads) == ""
    assert "of its output" in problem(y.detach() * 1.1, grads)
    halved = [grads[0] / 2, *grads[1:]]
    assert "grad_query" in problem(y.detach(), halved)
    with_nan = [*grads[:2], grads[2].clone()]
    with_nan[2][0, 0, 0, 3] = float("nan")
    assert "of its grad_value 1 of" in problem(y.detach(), with_nan)
