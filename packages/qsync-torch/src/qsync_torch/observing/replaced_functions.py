"""Functions of PyTorch replaced by others of the same signature, for the time of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

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


# ---- merged from qsync_torch.observing.replaced_functions
# Dropout whose masks depend on shapes and the seed alone, not on the format of what is dropped.
#
# PyTorch's kernels draw other masks for a bfloat16 activation than for a float32 one: two passes from one seed would differ by
# their masks, which is a hundred times what rounding changes.


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0:
        return x
    mask = random_mask(x, x.shape, p)
    return x.mul_(mask) if inplace else (x * mask).to(x.dtype)


def _dropout2d(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0:
        return x
    mask = random_mask(x, torch.Size((*x.shape[:2], *(1 for _ in x.shape[2:]))), p)
    return x.mul_(mask) if inplace else (x * mask).to(x.dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p == 0.0 or enable_gqa:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    reading = None
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    elif attn_mask is not None:
        attn_mask, reading = without_empty_rows(attn_mask)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    weights = scores.float().softmax(-1).to(value.dtype)
    output = (weights * random_mask(weights, weights.shape, dropout_p)).to(value.dtype) @ value
    return output if reading is None else output * reading


def without_empty_rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask without queries that may read no key, whose softmax is not a number, and what to multiply the output with instead:
    PyTorch gives such a query zeros.

    Args:
        mask: (..., L or 1, S), boolean (True is read) or added to the scores.

    Returns:
        The mask with those rows opened, and (..., L or 1, 1), False there.
    """
    if mask.dtype is torch.bool:
        reading = mask.any(-1, keepdim=True)
        return mask | ~reading, reading
    reading = (mask != -torch.inf).any(-1, keepdim=True)
    return mask.masked_fill(~reading, 0.0), reading


def random_mask(x: torch.Tensor, shape: torch.Size, p: float) -> torch.Tensor:
    """Zeros with probability p, else 1/(1-p), in the format that PyTorch's dropout of ``x`` multiplies in: that of ``x`` on a CPU,
    float32 on a GPU."""
    kept = torch.empty(shape, dtype=torch.float32, device=x.device).bernoulli_(1 - p)
    if p < 1:
        kept.div_(1 - p)
    return kept if x.is_cuda else kept.to(x.dtype)


class PairedDropout(ReplacedFunctions):
    """While active, dropout and attention with dropout draw their masks in float32."""

    replacements: ClassVar = {
        F.dropout: _dropout,
        F.dropout2d: _dropout2d,
        F.scaled_dot_product_attention: _attention,
    }


# ---- merged from qsync_torch.observing.replaced_functions
# Attention that keeps nothing but what it reads, however often it is differentiated.
#
# Fused kernels have no second derivative.  Plain products have, but their probabilities, and what becomes of them in two backward
# passes, take more memory than the rest of a model; here they are computed anew where they are needed.


def _lean_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    reading = None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    elif attn_mask is not None:
        attn_mask, reading = without_empty_rows(attn_mask)
    kept = None
    if dropout_p > 0:
        shape = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        kept = random_mask(query, torch.Size((*shape, query.shape[-2], key.shape[-2])), dropout_p) != 0
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    return _Attention.apply(query, key, value, _Options(attn_mask, reading, kept, dropout_p, factor))  # type: ignore[no-any-return,no-untyped-call]


class LeanAttention(ReplacedFunctions):
    """While active, scaled dot-product attention runs as a function of this module, with dropout masks as in PairedDropout."""

    replacements: ClassVar = {F.scaled_dot_product_attention: _lean_attention}


class _Options:
    """What attention is computed with, besides its operands."""

    def __init__(
        self, mask: torch.Tensor | None, reading: torch.Tensor | None, kept: torch.Tensor | None, p: float, scale: float
    ) -> None:
        self.mask, self.reading, self.kept, self.p, self.scale = mask, reading, kept, p, scale

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """By plain products."""
        scores = query @ key.transpose(-2, -1) * self.scale
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -torch.inf) if self.mask.dtype is torch.bool else scores + self.mask
        weights = scores.softmax(-1)
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
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *directions: torch.Tensor) -> Any:
        with torch.enable_grad():
            grad, *operands = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            gradients = torch.autograd.grad(ctx.options.attend(*operands), operands, grad, create_graph=True)
        return *torch.autograd.grad(gradients, [grad, *operands], directions), None
