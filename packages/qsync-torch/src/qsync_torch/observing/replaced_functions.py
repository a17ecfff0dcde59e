"""Functions of PyTorch replaced by others of the same signature, for the time of a forward pass: dropout and attention.

:class:`PairedDropout` draws dropout masks that depend on shapes and the seed alone.  PyTorch's kernels draw other masks for a
bfloat16 activation than for a float32 one: two passes from one seed would differ by their masks, which is a hundred times what
rounding changes.

:class:`LeanAttention` keeps nothing but what attention reads, however often it is differentiated.  Fused kernels have no second
derivative.  Plain products have, but their probabilities, and what becomes of them in two backward passes, take more memory than
the rest of a model; here they are computed anew where they are needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


class ReplacedFunctions(TorchFunctionMode):
    """While active, the functions that ``replacements`` names run as what it gives for them."""

    replacements: ClassVar[Mapping[Any, Callable[..., Any]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, or what replaces it."""
        return self.replacements.get(func, func)(*args, **(kwargs or {}))


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return _dropped(x, x.shape, p, inplace) if training and p > 0 else x


def _dropout2d(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    channels = torch.Size((*x.shape[:2], *(1 for _ in x.shape[2:])))
    return _dropped(x, channels, p, inplace) if training and p > 0 else x


def _dropped(x: torch.Tensor, shape: torch.Size, p: float, inplace: bool) -> torch.Tensor:
    mask = _random_mask(x, shape, p)
    return x.mul_(mask) if inplace else (x * mask).to(x.dtype)


def _random_mask(x: torch.Tensor, shape: torch.Size, p: float) -> torch.Tensor:
    """Zeros with probability p, else 1/(1-p), in the format that PyTorch's dropout of ``x`` multiplies in: that of ``x`` on a CPU,
    float32 on a GPU."""
    kept = torch.empty(shape, dtype=torch.float32, device=x.device).bernoulli_(1 - p)
    if p < 1:
        kept.div_(1 - p)
    return kept if x.is_cuda else kept.to(x.dtype)


def _attention(
    lean: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of :class:`LeanAttention`, or of :class:`PairedDropout`."""
    if enable_gqa or (attn_mask is not None and attn_mask.requires_grad if lean else dropout_p == 0.0):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    mask, reading = _without_empty_rows(query, key, attn_mask, is_causal)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if not lean:
        weights = _scores(query, key, mask, factor).float().softmax(-1).to(value.dtype)
        output = (weights * _random_mask(weights, weights.shape, dropout_p)).to(value.dtype) @ value
        return output if reading is None else output * reading
    kept = None
    if dropout_p > 0:
        shape = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        kept = _random_mask(query, torch.Size((*shape, query.shape[-2], key.shape[-2])), dropout_p) != 0
    options = _Options(mask, reading, kept, dropout_p, factor)
    return _Attention.apply(query, key, value, options)  # type: ignore[no-any-return,no-untyped-call]


class PairedDropout(ReplacedFunctions):
    """While active, dropout and attention with dropout draw their masks in float32."""

    replacements: ClassVar = {
        F.dropout: _dropout,
        F.dropout2d: _dropout2d,
        F.scaled_dot_product_attention: functools.partial(_attention, False),
    }


class LeanAttention(ReplacedFunctions):
    """While active, scaled dot-product attention computes its probabilities anew in backward, with PairedDropout's masks."""

    replacements: ClassVar = {F.scaled_dot_product_attention: functools.partial(_attention, True)}


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, factor: float) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) * factor
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask


def _without_empty_rows(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A mask in which every query may read a key, and what to multiply the output with instead.

    PyTorch gives zeros to a query that may read no key; the softmax of such a row is not a number.

    Args:
        query, key: (..., L, E) and (..., S, E).
        mask: (..., L or 1, S), boolean (True is read) or added to the scores; None for none.
        is_causal: query i reads keys up to i; ``mask`` is None then.

    Returns:
        The mask with empty rows opened, and (..., L or 1, 1), False for those rows; None where no row can be empty.
    """
    if is_causal:
        return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril(), None
    if mask is None:
        return None, None
    if mask.dtype is torch.bool:
        reading = mask.any(-1, keepdim=True)
        return mask | ~reading, reading
    reading = (mask != -torch.inf).any(-1, keepdim=True)
    return mask.masked_fill(~reading, 0.0), reading


@attrs.frozen(eq=False)
class _Options:
    """What attention is computed with, besides its operands."""

    mask: torch.Tensor | None
    reading: torch.Tensor | None
    kept: torch.Tensor | None
    p: float
    factor: float

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention by plain products."""
        weights = _scores(query, key, self.mask, self.factor).softmax(-1)
        if self.kept is not None:
            weights = weights * self.kept / (1 - self.p)
        output = weights @ value
        return output if self.reading is None else output * self.reading


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = options
        return options.attend(query, key, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *_AttentionBackward.apply(grad, *ctx.saved_tensors, ctx.options), None  # type: ignore[no-untyped-call]


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(grad, query, key, value)
        ctx.options = options
        with torch.enable_grad():
            operands = [x.detach().requires_grad_() for x in (query, key, value)]
            output = options.attend(*operands)
        return torch.autograd.grad(output, operands, grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *directions: torch.Tensor) -> Any:
        with torch.enable_grad():
            grad, *operands = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            gradients = torch.autograd.grad(ctx.options.attend(*operands), operands, grad, create_graph=True)
        return *torch.autograd.grad(gradients, [grad, *operands], directions), None
