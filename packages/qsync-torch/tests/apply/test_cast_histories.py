"""A cast leads gradients where its activation leads them now, whatever has become of that since an earlier operator read it."""

import contextlib

import pytest
import torch
from torch import nn

from qsync_core.ir.precision import Precision
from qsync_torch import apply_

FORMATS = ["float32", "bfloat16", "float16", "int8", "int8>float32"]
ERROR = 0.04
"""Relative; a stale cast misses by the whole of a gradient."""


class Layers(nn.Module):
    """Three layers that read one activation; ``way`` changes what it leads to in between."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.way = way

    def forward(self, x):
        return self.way(self, x)


def gradients_of_inputs(model, x):
    shift = model.a(x).detach().mean()
    x.requires_grad_()
    energy = model.b(x).sum() + shift + model.a(x).square().sum()
    (force,) = torch.autograd.grad(energy, x, retain_graph=True)
    return energy, force


def without_gradients_any_more(model, x):
    x.requires_grad_()
    first = model.a(x).square().sum()
    (inner,) = torch.autograd.grad(first, x, retain_graph=True)
    x.requires_grad_(False)
    return first + model.b(x).square().sum(), inner


def cut_off(model, x):
    model.a.requires_grad_(False)  # PyTorch refuses to detach in place what a trained layer has saved
    h = model.e(x) + 0
    first = model.a(h)
    h.detach_()
    return (first + 10 * model.b(h)).sum(), first


def cut_off_and_a_leaf(model, x):
    model.a.requires_grad_(False)  # PyTorch refuses to detach in place what a trained layer has saved
    h = model.e(x) + 0
    first = model.a(h).sum()
    h.detach_().requires_grad_()
    second = model.b(h).square().sum()
    (inner,) = torch.autograd.grad(second, h, retain_graph=True)
    return first + second, inner


def without_recording_first(model, x):
    h = model.e(x) + 0
    with torch.no_grad():
        target = model.a(h)
    return (model.a(h) - 2 * target).square().sum(), target


def recorded_first(model, x):
    h = model.e(x) + 0
    first = model.a(h)
    with torch.no_grad():
        target = model.a(h)
    return (first - 2 * target + model.b(h)).square().sum(), target


def in_inference_first(model, x):
    h = model.e(x) + 0
    with torch.inference_mode():
        target = model.a(h)
    return model.a(h).square().sum() + target.sum().item(), h


def by_a_hook(model, x):
    def needs_gradients(module, args):
        args[0].requires_grad_()

    handle = model.b.register_forward_pre_hook(needs_gradients)
    shift = model.a(x)
    energy = model.b(x).square().sum() + model.a(x).square().sum() + shift.sum()
    handle.remove()
    return energy, torch.autograd.grad(energy, x, retain_graph=True)[0]


def gradients_twice(model, x):
    x.requires_grad_()
    (first,) = torch.autograd.grad(model.a(x).square().sum(), x)
    (second,) = torch.autograd.grad(model.b(x).square().sum(), x)
    return model.a(x).square().sum(), first + 2 * second


WAYS = [
    gradients_of_inputs,
    without_gradients_any_more,
    cut_off,
    cut_off_and_a_leaf,
    without_recording_first,
    recorded_first,
    in_inference_first,
    by_a_hook,
    gradients_twice,
]


def step(way, kind=None, base=Precision.FLOAT32):
    model = Layers(way)
    if kind is not None:
        apply_(model, dict.fromkeys(("e#0", "a#0", "b#0"), kind), base=base, seed=1)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    context = torch.autocast("cpu", torch.bfloat16) if base is Precision.BFLOAT16 else contextlib.nullcontext()
    with context:
        loss, other = model(x)
    loss.backward()
    return [loss, other, x.grad, *(parameter.grad for parameter in model.parameters())]


def check(found, expected):
    assert [one is None for one in found] == [one is None for one in expected]
    for one, two in zip(found, expected, strict=True):
        assert one is None or (one - two).norm() <= ERROR * two.norm()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_reach_what_they_reach_in_float32(way, kind):
    check(step(way, kind), step(way))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_so_they_do_under_autocast(way, kind):
    check(step(way, kind, Precision.BFLOAT16), step(way))
