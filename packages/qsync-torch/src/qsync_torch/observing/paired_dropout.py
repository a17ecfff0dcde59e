"""Dropout whose masks depend on shapes and the seed alone, not on the format of what is dropped.

PyTorch's kernels draw other masks for a bfloat16 activation than for a float32 one: two passes from one seed would differ by their
masks, which is a hundred times what rounding changes.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F

from qsync_torch.observing.replaced_functions import ReplacedFunctions


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
