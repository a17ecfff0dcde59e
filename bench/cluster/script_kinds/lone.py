"""Ranks by themselves: requires_grad changes, detachments, forces, masks, reversible blocks, tied weights, accumulation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.precision import Precision

from .script import BATCH, WIDTH, Two, enter

Result = tuple[Any, ...]
ALL = "bfloat16 float16 int8 int8>float32"
SMALL = "bfloat16 int8"


@enter(ALL)
def force(m: Two, x: torch.Tensor) -> Result:
    shift = m.a(x).detach().mean()
    x.requires_grad_()
    energy = (m.b(x).square() + m.a(x).square()).mean() + shift
    return energy, torch.autograd.grad(energy, x, retain_graph=True)[0]


@enter(SMALL, base=Precision.BFLOAT16)
def force_under_autocast(m: Two, x: torch.Tensor) -> Result:
    return force(m, x)


@enter(ALL)
def a_new_leaf(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x) + 0
    first = F.linear(h, m.b.weight.detach()).square().mean()
    h = h.detach().requires_grad_()
    second = m.b(h).square().mean()
    return first + second, torch.autograd.grad(second, h, retain_graph=True)[0]


@enter(SMALL)
def target_of_itself(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    with torch.no_grad():
        target = m.b(h)
    return m.b(h) - 0.5 * target, target


@enter(SMALL)
def frozen_for_a_while(m: Two, x: torch.Tensor) -> Result:
    x.requires_grad_()
    m.b.requires_grad_(False)
    first = m.b(m.a(x)).square().mean()
    m.b.requires_grad_(True)
    return first + m.b(x).square().mean(), first


@enter(SMALL)
def frozen_input(m: Two, x: torch.Tensor) -> Result:
    x.requires_grad_()
    first = m.a(x).square().mean()
    x.requires_grad_(False)
    return first + m.b(x).square().mean(), first


@enter(SMALL)
def gradient_penalty_on_the_input(m: Two, x: torch.Tensor) -> Result:
    x.requires_grad_()
    h = m.a(x)
    (gradient,) = torch.autograd.grad(h.square().mean(), x, retain_graph=True)
    return m.b(h) + gradient, gradient


@enter(SMALL)
def straight_through(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    return m.b(h + (F.softsign(h) - h).detach()), h


@enter(SMALL)
def evaluated_in_inference_mode_first(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    with torch.inference_mode():
        weight = m.b(h).abs().mean().item()
    return m.b(h) / (1 + weight)


@enter(SMALL)
def masked_loss(m: Two, x: torch.Tensor) -> Result:
    y = m.b(torch.relu(m.a(x)))
    mask = torch.arange(BATCH * WIDTH).view(BATCH, WIDTH) % 3 > 0
    return (y[mask] - 0.5).square().mean(), y


@enter(SMALL)
def loss_over_valid_rows(m: Two, x: torch.Tensor) -> Result:
    y = m.b(m.a(x))
    rows = torch.tensor([0, 2, 3, 7, 7])
    return F.smooth_l1_loss(y[rows], torch.ones(5, WIDTH)), y.index_select(0, rows)


@enter(SMALL)
def masked_fill_and_softmax(m: Two, x: torch.Tensor) -> Result:
    y = m.a(x).masked_fill(torch.eye(WIDTH)[:BATCH] > 0, float("-inf")).softmax(-1)
    return m.b(y * 10), y


@enter(SMALL)
def guard_against_nan(m: Two, x: torch.Tensor) -> Result:
    y = m.b(m.a(x))
    return y.square().mean() if not torch.isnan(y).any() else y.sum() * 0, y


@enter(SMALL)
def ignored_classes(m: Two, x: torch.Tensor) -> Result:
    y = m.b(m.a(x))
    target = torch.arange(BATCH)
    target[::3] = -100
    return F.cross_entropy(y, target), y


class Reversible(torch.autograd.Function):
    """A block that keeps its results alone and computes its inputs from them in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, f: Any, g: Any) -> Any:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            x = x + f(y)
            y = y + g(x)
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, grad_y: torch.Tensor) -> Any:
        x, y = (t.detach() for t in ctx.saved_tensors)
        with torch.enable_grad():
            x.requires_grad_()
            change = ctx.g(x)
        change.backward(grad_y)
        grad_x, before = grad_x + x.grad, (y - change).detach().requires_grad_()
        with torch.enable_grad():
            change = ctx.f(before)
        change.backward(grad_x)
        return grad_x, grad_y + before.grad, None, None


@enter(ALL)
def reversible_block(m: Two, x: torch.Tensor) -> Result:
    x.requires_grad_()
    first, second = Reversible.apply(x, x * 0.5, m.a, m.b)
    return first + second, first


class Tied(Two):
    """The second layer reads the first one's weight."""

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self.b.weight = self.a.weight


@enter(SMALL, make=Tied, layers="a")
def tied(m: Two, x: torch.Tensor) -> Result:
    return m.b(torch.relu(m.a(x)))


@enter(SMALL, layers="a")
def tied_and_transposed(m: Two, x: torch.Tensor) -> Result:
    return torch.relu(m.a(x)) @ m.a.weight


class Following(Two):
    """``b`` is no trained layer."""

    def __init__(self, body: Any) -> None:
        super().__init__(body)
        self.b.requires_grad_(False)


@enter(ALL, make=Following)
def detached_in_place(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x) + 0
    first = m.b(h)
    h.detach_()
    return first + 3 * m.a(h), h


@enter(SMALL, make=Following)
def momentum_encoder(m: Two, x: torch.Tensor) -> Result:
    with torch.no_grad():
        for slow, fast in zip(m.b.parameters(), m.a.parameters(), strict=True):
            slow.lerp_(fast, 0.5)
        target = F.normalize(m.b(x.roll(1, 0)), dim=1)
    return 2 - 2 * (F.normalize(m.a(x), dim=1) * target).sum(1).mean(), target


def _accumulated(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    for part in x.chunk(4):
        (model(part).square().mean() / 4).backward()
    return {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}


@enter(ALL, step=_accumulated)
def accumulated(m: Two, x: torch.Tensor) -> Any:
    return m.b(torch.relu(m.a(x)))


@enter(SMALL, step=_accumulated, base=Precision.BFLOAT16)
def accumulated_under_autocast(m: Two, x: torch.Tensor) -> Any:
    return m.b(torch.relu(m.a(x)))


@enter(SMALL, base=Precision.BFLOAT16)
def autocast_left_inside(m: Two, x: torch.Tensor) -> Result:
    h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        h = h.float().softmax(-1) * 10
    return m.b(h), h


@enter(SMALL)
def images_as_boxes(m: Two, x: torch.Tensor) -> Result:
    """A batch as detectors have it: tensors of different lengths in a list, read one by one."""
    parts = [m.a(part) for part in x.split([1, 3, 4])]
    losses = [F.l1_loss(m.b(part), torch.zeros(len(part), WIDTH)) for part in parts]
    return sum(losses[1:], losses[0]), torch.cat(parts)
