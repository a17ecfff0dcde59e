"""ReLU and max pooling that can be differentiated twice: PyTorch's values, and flips against noise that flips masks."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_torch.observing import mask_flips
from qsync_torch.observing.mask_flips import FLIP_FACTOR, Masks

RELUS = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "Tensor.relu": lambda a: a.relu(),
    "module": nn.ReLU(),
    "F.relu in place": lambda a: F.relu(a, inplace=True),
    "torch.relu_": torch.relu_,
    "Tensor.relu_": lambda a: a.relu_(),
    "module in place": nn.ReLU(inplace=True),
}
POOLS = {
    "2": {"kernel_size": 2},
    "overlapping": {"kernel_size": 3, "stride": 1},
    "3, 2, 1": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilation": {"kernel_size": (2, 3), "stride": (1, 2), "dilation": (3, 2)},
    "ceil_mode": {"kernel_size": 2, "stride": 2, "ceil_mode": True},
    "ceil_mode, padding": {"kernel_size": 3, "stride": (2, 3), "padding": 1, "ceil_mode": True},
    "oblong": {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 1)},
}


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _both(function, *shape):
    """(values, gradient, second derivative by the incoming gradient), with masks and without."""
    results = []
    for masks in (Masks(), None):
        torch.manual_seed(0)
        x = _random(*shape).requires_grad_()
        if masks is None:
            output = function(x)
        else:
            with masks:
                output = function(x)
        grad = _random(*output.shape).requires_grad_()
        (first,) = torch.autograd.grad(output, x, grad, create_graph=True)
        (second,) = torch.autograd.grad((first * _random(*shape)).sum(), grad)
        results.append((output, first, second, masks))
    return results


@pytest.mark.parametrize("name", RELUS)
def test_relu_is_pytorchs(name):
    # What it reads is not a leaf, which could not be changed in place; sums read the tensor before and after.
    def net(x):
        a = torch.sinh(x) + 0
        before = a.sum()
        view = a.view(-1)
        y = RELUS[name](a)
        return y * 2 + a + view.view_as(a) * before

    found, expected = _both(net, 3, 7)
    assert len(found[3].seen) == 1
    for f, e in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_is_pytorchs(name):
    found, expected = _both(lambda x: F.max_pool2d(x, **POOLS[name]), 2, 3, 9, 8)
    assert len(found[3].seen) == 1
    for f, e in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(f, e)


@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 2}, {"kernel_size": (3,), "stride": 1, "padding": 1}, {"kernel_size": 3, "dilation": 2, "ceil_mode": True}],
)
def test_max_pooling_of_rows_is_pytorchs(options):
    found, expected = _both(lambda x: F.max_pool1d(x, **options), 2, 3, 17)
    assert len(found[3].seen) == 1
    for f, e in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(f, e)


def test_modules_of_max_pooling_too():
    found, expected = _both(nn.MaxPool2d(3, 2, 1, ceil_mode=True), 2, 3, 6, 7)
    assert len(found[3].seen) == 1
    assert torch.equal(found[1], expected[1])


def test_a_tensor_that_another_function_needs_is_not_changed_silently():
    """PyTorch refuses the backward pass of a function whose operand was overwritten; so it is here."""

    def net(x):
        a = x * 2
        squared = a * a
        return squared + F.relu(a, inplace=True)

    x = torch.randn(5, requires_grad=True)
    with Masks():
        output = net(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_what_is_not_differentiated_is_no_mask():
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    with Masks() as masks:
        with torch.no_grad():
            F.relu(x)
        F.max_pool2d(x.detach(), 2)
        F.max_pool2d(x[0], 2)
        F.max_pool2d(x, 2, return_indices=True)
        F.gelu(x)
    assert masks.seen == []
    F.relu(x)
    assert masks.seen == []


def _flips(function, a, grad, v, seed=None):
    """What the derivative of the gradient that ``function`` hands to ``a``, in the direction v, adds by flips."""
    a = a.clone().requires_grad_()
    grad = grad.clone().requires_grad_()
    with Masks(seed) as masks:
        output = function(a)
    (first,) = torch.autograd.grad(output, a, grad, create_graph=True)
    (first * v).sum().backward()
    return masks.seen[0]


@pytest.mark.parametrize("name", POOLS)
def test_runner_up_and_distance_against_brute_force(name, monkeypatch):
    """With a window so wide that the distance decides for about half of the windows."""
    monkeypatch.setattr(mask_flips, "WINDOW", 0.5)
    torch.manual_seed(0)
    options, a = POOLS[name], _random(2, 2, 9, 8)
    grad = _random(*F.max_pool2d(a, **options).shape)
    v = _random(*a.shape)
    found = _flips(lambda x: F.max_pool2d(x, **options), a, grad, v)

    def two(value):
        return (value, value) if isinstance(value, int) else value

    kernel = two(options["kernel_size"])
    stride, padding = two(options.get("stride", kernel)), two(options.get("padding", 0))
    dilation = two(options.get("dilation", 1))
    half_width = 0.5 * math.sqrt(2) * float(a.std(correction=0))
    expected, near, windows = torch.zeros_like(a), 0, 0
    for n, c, i, j in itertools.product(*map(range, grad.shape)):
        places = [
            (row, column)
            for row in (i * stride[0] - padding[0] + k * dilation[0] for k in range(kernel[0]))
            for column in (j * stride[1] - padding[1] + k * dilation[1] for k in range(kernel[1]))
            if 0 <= row < a.shape[2] and 0 <= column < a.shape[3]
        ]
        windows += 1
        if len(places) < 2:
            continue
        first, second, *_ = sorted(places, key=lambda place: -float(a[n, c, *place]))
        if float(a[n, c, *first] - a[n, c, *second]) >= half_width:
            continue
        near += 1
        change = (v[n, c, *first] - v[n, c, *second]) * grad[n, c, i, j] / (2 * half_width)
        expected[n, c, *first] += change
        expected[n, c, *second] -= change
    assert 0.1 * windows < near < windows
    torch.testing.assert_close(found.flips.double(), expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))


def test_a_window_of_one_element_has_no_runner_up():
    a, grad = _random(2, 2, 6, 6), _random(2, 2, 3, 3)
    found = _flips(lambda x: F.max_pool2d(x, 1, 2), a, grad, torch.ones_like(a))
    assert not found.flips.any()


def test_window_of_a_relu_by_hand(monkeypatch):
    monkeypatch.setattr(mask_flips, "WINDOW", 0.5)
    a = torch.tensor([-3.0, -0.5, 0.25, 1.0, 2.25])
    grad, v = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0]), torch.tensor([1.0, -1.0, 2.0, 1.0, 1.0])
    found = _flips(F.relu, a, grad, v)
    t = 0.5 * math.sqrt((9 + 0.25 + 0.0625 + 1 + 5.0625) / 5)  # the mean is 0
    assert float(found.std) == pytest.approx(2 * t)
    expected = torch.tensor([0.0, -2.0, -6.0, 0.0, 0.0]) / (2 * t)
    torch.testing.assert_close(found.flips.float(), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("inplace", [False, True])
def test_flips_go_where_the_relu_reads(inplace):
    """In place or not, the same is carried back to what came before."""
    torch.manual_seed(0)
    x, grad, v = (torch.randn(2000) for _ in range(3))

    def carried():
        leaf = x.clone().requires_grad_()
        with Masks() as masks:
            output = F.relu(leaf * 3, inplace=inplace) ** 2
        (first,) = torch.autograd.grad(output, leaf, grad, create_graph=True)
        (first * v).sum().backward(retain_graph=True)
        leaf.grad = None
        torch.autograd.backward([masks.seen[0].edge], [masks.seen[0].flips.float()])
        return leaf.grad

    near = (x.abs() < mask_flips.WINDOW * x.std(correction=0)).float()
    relu, t = torch.relu(3 * x), mask_flips.WINDOW * 3 * x.std(correction=0)
    expected = 3 * (3 * v) * (2 * relu * grad) * near / (2 * t)
    assert 10 < int(near.sum()) < 100
    torch.testing.assert_close(carried(), expected, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("mean", [0.0, 1.5])
@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_flips_of_relu_against_noise(mean, sigma):
    """The expected square of the change of the gradient that is passed, under Gaussian noise, which flips for real."""
    torch.manual_seed(0)
    a, grad, noise = (torch.randn(2_000_000) for _ in range(3))
    a = 2 * a + mean
    true = grad.square()[(a > 0) != (a + 2 * sigma * noise > 0)].double().sum()
    found = _flips(F.relu, a, grad, torch.ones_like(a))
    windowed = ((2 * sigma) ** 2 * found.flips.double().square()).sum()
    assert float(FLIP_FACTOR * windowed / sigma) == pytest.approx(float(true), rel=0.04)


@pytest.mark.parametrize("function", [F.relu, lambda a: F.max_pool2d(a, 2)], ids=["relu", "max_pool2d"])
def test_a_flip_has_a_sign_of_its_own(function, monkeypatch):
    """Both elements that a pooling exchanges have the same, so that noise which they share does not count."""
    monkeypatch.setattr(mask_flips, "WINDOW", 0.5)
    torch.manual_seed(0)
    a, v = torch.randn(4, 8, 16, 16), torch.randn(4, 8, 16, 16)
    grad = torch.randn_like(function(a))
    plain = _flips(function, a, grad, v).flips.double()
    signed, again, other = (_flips(function, a, grad, v, seed).flips.double() for seed in (3, 3, 4))
    assert torch.equal(signed.abs(), plain.abs())
    assert torch.equal(signed, again)
    assert not torch.equal(signed, other)
    changed = (signed != plain)[plain != 0].double()
    assert float(changed.mean()) == pytest.approx(0.5, abs=0.05)
    if function is not F.relu:
        torch.testing.assert_close(F.avg_pool2d(signed, 2), torch.zeros_like(F.avg_pool2d(signed, 2)))


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 3}], ids=["2", "3"])
def test_flips_of_pooling_against_noise(options):
    torch.manual_seed(0)
    sigma = 0.05
    a = torch.randn(16, 8, 96, 96)
    grad = torch.randn_like(F.max_pool2d(a, **options))

    def passed(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(F.max_pool2d(x, **options), x, grad)[0]

    true = torch.stack([(passed(a + sigma * torch.randn_like(a)) - passed(a)).double().square().sum() for _ in range(3)]).mean()
    signs = torch.randint(0, 2, a.shape) * 2.0 - 1
    found = _flips(lambda x: F.max_pool2d(x, **options), a, grad, signs)
    windowed = (sigma**2 * found.flips.double().square()).sum()
    assert float(FLIP_FACTOR * windowed / sigma) == pytest.approx(float(true), rel=0.06)
