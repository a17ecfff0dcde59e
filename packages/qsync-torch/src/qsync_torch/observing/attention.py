"""Attention that keeps nothing but what it reads, however often it is differentiated.

Fused kernels have no second derivative.  Plain products have, but their probabilities, and what becomes of them in two backward
passes, take more memory than the rest of a model; here they are computed anew where they are needed.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from qsync_torch.observing.paired_dropout import random_mask, without_empty_rows
from qsync_torch.observing.replaced_functions import ReplacedFunctions


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

    replacements: ClassVar = {F.scaled_dot_product_attention: _attention}


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
        return *_Backward.apply(grad, *ctx.saved_tensors, ctx.options), None  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
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
