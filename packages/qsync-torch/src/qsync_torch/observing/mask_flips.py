"""Masks that flip: second derivatives for ReLU and max pooling, which have none of their own (docs/design/indicator.md#flips).

The gradient that a ReLU passes is g·1[a > 0].  Noise δ in a changes it by ±g wherever |δ| exceeds |a|, so the expected square of
the change is g²·p(0)·E|δ|, p being the density of a.  Autograd calls the derivative zero.  With the window 1[|a| < t]/(2t) in its
place, a linear response gives g²·p(0)·E[δ²]/(2t): too large by the factor σ/(2√(2/π)·t) for Gaussian noise of standard deviation
σ, the inverse of which it is multiplied with.  The same holds for the winner of a max pooling, with the distance to the runner-up
in the place of a and noise of variance 2σ² in it.

What enters a gradient through a mask's derivative is, at each mask, a gradient with respect to a: v·g·1[|a| < t]/(2t), where v is
what a double backward pass brings to the mask.  It is kept here; carried back through the forward pass it is the response of
flips alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

WINDOW = 0.02
"""Half width of the window, in standard deviations of what it is taken of: narrow enough for p(0), with many elements in it."""
FLIP_FACTOR = 2 * math.sqrt(2 / math.pi) * WINDOW
"""What squares of the response are multiplied with, beside the inverse of the relative noise σ/std."""
_pool: Callable[..., Any] = F.max_pool2d
"""Max pooling without its overloads, which accept literals only."""


@attrs.define(eq=False)
class Spreads:
    """The standard deviations of what all masks of a pass read, 0-d each; what follows from them is computed for all at once."""

    stds: list[torch.Tensor] = attrs.field(factory=list)
    _densities: tuple[torch.Tensor, ...] = attrs.field(default=(), init=False)

    def density(self, index: int) -> torch.Tensor:
        """Return the density of one mask's window: 1/(2t)."""
        if len(self._densities) != len(self.stds):
            self._densities = _density(WINDOW * torch.stack(self.stds)).unbind()
        return self._densities[index]


@attrs.define(eq=False)
class Signs:
    """Random signs, drawn in the order in which a backward pass comes by.

    Attributes:
        seed: of what is drawn; None leaves everything as it is.
    """

    seed: int | None
    _generators: dict[torch.device, torch.Generator] = attrs.field(factory=dict, init=False)

    def change(self, flips: torch.Tensor) -> torch.Tensor:
        """Multiply every element with a sign of its own, in place."""
        if self.seed is None:
            return flips
        if flips.device not in self._generators:
            self._generators[flips.device] = torch.Generator(flips.device).manual_seed(self.seed)
        signs = torch.empty_like(flips, dtype=torch.int8).random_(0, 2, generator=self._generators[flips.device])
        return flips.mul_(signs.mul_(2).sub_(1))


@attrs.define(eq=False)
class Mask:
    """One ReLU or max pooling of a forward pass.

    Attributes:
        edge: where the graph of what it read, ``a``, begins; ``a`` itself is not kept.
        like: shape and layout of ``a``, without memory.
        spreads, index: where the standard deviation of ``a`` is.
        signs: what every flip is multiplied with; the two elements that a max pooling exchanges have the same.
        flips: the gradient with respect to ``a`` that windows bring about; None until a double backward pass came by.
    """

    edge: GradientEdge
    like: torch.Tensor
    spreads: Spreads
    index: int
    signs: Signs
    flips: torch.Tensor | None = None

    @property
    def std(self) -> torch.Tensor:
        """The standard deviation of ``a``, 0-d."""
        return self.spreads.stds[self.index]


class Masks(TorchFunctionMode):
    """While active, collects the masks that run, in order, as functions that can be differentiated twice.

    Args:
        seed: of a random sign for every flip; None gives them none.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.signs = Signs(seed)
        self.seen: list[Mask] = []
        self.spreads = Spreads()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Put the functions of this module in the place of PyTorch's."""
        handler = _HANDLERS.get(func)
        if handler is None or not args or not args[0].requires_grad or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return handler(self, *args, **(kwargs or {}))

    def add(self, a: torch.Tensor) -> Mask:
        """A mask that reads ``a``."""
        self.spreads.stds.append(a.detach().std(correction=0))
        index, like = len(self.seen), torch.empty_like(a, device="meta")
        self.seen.append(Mask(get_gradient_edge(a), like, self.spreads, index, self.signs))
        return self.seen[-1]


def _relu(masks: Masks, a: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return _relu_in_place(masks, a) if inplace else _relu_of(masks, a)


def _relu_of(masks: Masks, a: torch.Tensor) -> torch.Tensor:
    return _ReLU.apply(a, masks.add(a), False)  # type: ignore[no-any-return,no-untyped-call]


def _relu_in_place(masks: Masks, a: torch.Tensor) -> torch.Tensor:
    """Other readers of ``a`` see it changed, as they would."""
    return _ReLU.apply(a, masks.add(a), True)  # type: ignore[no-any-return,no-untyped-call]


def _max_pool(
    pool: Callable[..., Any],
    dimensions: int,
    masks: Masks,
    a: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """``F.max_pool2d``, and ``F.max_pool1d`` as a pooling of images of one row."""
    if a.dim() != 2 + dimensions or return_indices:
        return pool(a, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    pairs = [_pair(size) for size in (kernel_size, kernel_size if stride in (None, [], ()) else stride, padding, dilation)]
    if dimensions == 2:
        return _MaxPool.apply(a, (*pairs, ceil_mode), masks.add(a))  # type: ignore[no-untyped-call]
    a, of_row = a.unsqueeze(2), [(first, pair[1]) for first, pair in zip((1, 1, 0, 1), pairs, strict=True)]
    return _MaxPool.apply(a, (*of_row, ceil_mode), masks.add(a)).squeeze(2)  # type: ignore[no-untyped-call]


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.relu: _relu,
    torch.relu: _relu_of,
    torch.Tensor.relu: _relu_of,
    torch.relu_: _relu_in_place,
    torch.Tensor.relu_: _relu_in_place,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), functools.partial(_max_pool, _pool, 2)),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), functools.partial(_max_pool, F.max_pool1d, 1)),
}


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, mask: Mask, inplace: bool) -> torch.Tensor:
        # One byte an element; keeping ``a`` would take four more.
        near = a.abs() < WINDOW * mask.std
        ctx.save_for_backward((a > 0).to(torch.uint8).add_(near, alpha=2))
        ctx.mask = mask
        if inplace:
            ctx.mark_dirty(a)
            return a.relu_()
        return a.relu()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (code,) = ctx.saved_tensors
        return _Gate.apply(grad, code, ctx.mask), None, None  # type: ignore[no-untyped-call]


class _Gate(torch.autograd.Function):
    """The gradient that a ReLU passes, as a function of the gradient alone; its derivative by ``a`` goes to the mask.

    ``code`` has 1 for a positive element, and 2 for one in the window.
    """

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, code: torch.Tensor, mask: Mask) -> torch.Tensor:
        ctx.save_for_backward(grad, code)
        ctx.mask = mask
        return grad * (code & 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: torch.Tensor) -> Any:
        grad, code = ctx.saved_tensors
        # Few elements are near; two bytes hold them well enough.
        mask: Mask = ctx.mask
        mask.flips = mask.signs.change(((code > 1) * grad).mul_(v).mul_(mask.spreads.density(mask.index))).bfloat16()
        return v * (code & 1), None, None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, geometry: Any, mask: Mask) -> torch.Tensor:
        pooled: torch.Tensor
        pooled, winner = _pool(a, *geometry[:4], ceil_mode=geometry[4], return_indices=True)
        ctx.save_for_backward(a, winner)
        ctx.geometry, ctx.mask = geometry, mask
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, winner = ctx.saved_tensors
        return _Route.apply(grad, a.detach(), winner, ctx.geometry, ctx.mask), None, None  # type: ignore[no-untyped-call]


class _Route(torch.autograd.Function):
    """The gradient that a max pooling hands to its winners, as a function of the gradient alone; see :class:`_Gate`."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, a: torch.Tensor, winner: torch.Tensor, geometry: Any, mask: Mask) -> torch.Tensor:
        ctx.save_for_backward(grad, a, winner)
        ctx.geometry, ctx.mask = geometry, mask
        routed = torch.zeros_like(a).flatten(2)
        return _laid_out_like(routed.scatter_add_(2, winner.flatten(2), grad.flatten(2)), a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: torch.Tensor) -> Any:
        grad, a, winner = ctx.saved_tensors
        first = winner.flatten(2)
        by_grad = v.flatten(2).gather(2, first)
        runner_up, distance = _runners_up(a, grad.shape[2:], ctx.geometry)
        half_width = math.sqrt(2) * WINDOW * ctx.mask.std
        moved = (by_grad - v.flatten(2).gather(2, runner_up)) * grad.flatten(2) * (distance < half_width) * _density(half_width)
        moved = ctx.mask.signs.change(moved)
        flips = torch.zeros_like(a).flatten(2).scatter_add_(2, first, moved).scatter_add_(2, runner_up, -moved)
        ctx.mask.flips = _laid_out_like(flips, a)
        return _laid_out_like(by_grad, grad), None, None, None, None


def _laid_out_like(flat: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """(N, C, H·W) as an image in the layout of another: adding up two layouts takes longer than to convert one."""
    channels_last = image.is_contiguous(memory_format=torch.channels_last)
    return flat.view(image.shape).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _density(half_width: torch.Tensor) -> torch.Tensor:
    """Return the density of a window of half width t: 1/(2t)."""
    return 1 / (2 * half_width).clamp(min=torch.finfo(half_width.dtype).tiny)


def _runners_up(a: torch.Tensor, out_size: torch.Size, geometry: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, in each window of a pooling, the index (into H·W) of its second largest element and its distance to the largest.

    Args:
        a: (N, C, H, W).
        out_size: height and width of the pooled tensor.
        geometry: kernel, stride, padding, dilation, ceil_mode.

    Returns:
        Two tensors (N, C, windows); the distance is infinite for a window of one element.
    """
    (kernel_h, kernel_w), (stride_h, stride_w), (pad_h, pad_w), (step_h, step_w), _ = geometry
    out_h, out_w = out_size
    height, width = a.shape[2:]
    bottom = (out_h - 1) * stride_h + step_h * (kernel_h - 1) + 1 - height - pad_h
    right = (out_w - 1) * stride_w + step_w * (kernel_w - 1) + 1 - width - pad_w
    padded = F.pad(a, (pad_w, right, pad_h, bottom), value=-torch.inf)
    best = torch.full((*a.shape[:2], out_h, out_w), -torch.inf, dtype=a.dtype, device=a.device)
    second, best_at, second_at = best.clone(), torch.zeros_like(best, dtype=torch.long), torch.zeros_like(best, dtype=torch.long)
    rows = torch.arange(out_h, device=a.device)[:, None] * stride_h - pad_h
    columns = torch.arange(out_w, device=a.device) * stride_w - pad_w
    for row in range(0, step_h * kernel_h, step_h):
        for column in range(0, step_w * kernel_w, step_w):
            value = padded[
                :, :, row : row + stride_h * (out_h - 1) + 1 : stride_h, column : column + stride_w * (out_w - 1) + 1 : stride_w
            ]
            at = ((rows + row) * width + columns + column).clamp(0, height * width - 1)  # beyond the image only where it is -inf
            wins, places = value > best, value > second
            second_at = torch.where(wins, best_at, torch.where(places, at, second_at))
            second = torch.where(wins, best, torch.where(places, value, second))
            best_at, best = torch.where(wins, at, best_at), torch.where(wins, value, best)
    return second_at.flatten(2), (best - second).flatten(2)
