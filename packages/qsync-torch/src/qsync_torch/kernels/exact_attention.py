"""Whether batched products and attention are right, like :mod:`qsync_torch.kernels.exact_products` of single ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from qsync_torch.kernels.exact_products import SIGMAS, STEPS, allowed_error, random_signs, said_of

_ATTENTION_STEPS = 16.0
"""The bound of an attention's norm, in steps: probabilities and partial sums are rounded to 16 bits between its two products."""
_CHUNK = 1 << 24
_LARGEST = 1 << 31
"""Products of two numbers in one head beyond which its gradients are not checked, only some rows of its output."""
_ROWS = 16


def batched_problem(a: torch.Tensor, b: torch.Tensor, found: torch.Tensor) -> str:
    """What is wrong with ``found`` (..., M, N) as the product of ``a`` (..., M, K) and ``b`` (..., K, N); else empty."""
    signs = random_signs(found.shape[-1], found, torch.Generator().manual_seed(0)).double()
    allowed = allowed_error(STEPS[found.dtype], a.shape[-1])
    wide_b = b.double()
    sums, squares = (wide_b * signs).sum(-1), (wide_b**2).sum(-1)
    wide_a, wide = a.double(), found.double()
    error = ((wide * signs).sum(-1) - (wide_a * sums[..., None, :]).sum(-1)).abs()
    bound = SIGMAS * allowed * (wide_a**2 * squares[..., None, :]).sum(-1).sqrt() + 1e-30
    return said_of((error / bound).nan_to_num(math.inf).max(), found, allowed)


def product64(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """``a_MK @ b_NK.T`` of element-wise products and sums alone."""
    each = max(1, _CHUNK // max(1, b_NK.numel()))
    parts = [(a_MK[first : first + each, None] * b_NK[None]).sum(-1) for first in range(0, a_MK.shape[0], each)]
    return torch.cat(parts)


def attention_problem(
    operands: Sequence[torch.Tensor],
    found: torch.Tensor,
    grad: torch.Tensor | None,
    grads: Sequence[torch.Tensor | None],
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> str:
    """What is wrong with attention and its gradients: all of them finite, and one head drawn at random compared with the exact one.

    Args:
        operands: query, key and value (B, H, L, D), with fewer heads of key and value where heads share them.
        grad, grads: of the output, and of the operands; None where they are not wanted.
        mask: of the call, boolean or added, of a shape that broadcasts to (B, H, L, S).
    """
    written = [("output", found), *zip(("grad_query", "grad_key", "grad_value"), grads, strict=True)]
    for name, tensor in written:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return f"of its {name} {int((~torch.isfinite(tensor)).sum())} of {tensor.numel()} elements are not finite"
    generator = torch.Generator().manual_seed(0)
    batch, head = (int(torch.randint(0, size, (1,), generator=generator)) for size in found.shape[:2])
    query, keys, values = (x[batch, head * x.shape[1] // found.shape[1]].double() for x in operands)
    length, size = query.shape[0], keys.shape[0]
    rows = torch.arange(length, device=query.device)
    whole = length * size * query.shape[1] <= _LARGEST
    if not whole:
        rows = torch.randperm(length, generator=generator)[:_ROWS].to(query.device)
    scale = 1 / math.sqrt(query.shape[1]) if scale is None else scale
    scores = product64(query[rows], keys) * scale
    if mask is not None:
        own = mask.expand(*found.shape[:2], length, size)[batch, head][rows]
        scores = scores.masked_fill(~own, -math.inf) if own.dtype is torch.bool else scores + own
    if is_causal:
        scores = scores.masked_fill(torch.arange(size, device=rows.device) > rows[:, None], -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num()
    pairs = [("output", found[batch, head][rows].double(), product64(weights, values.t()))]
    shared = operands[1].shape[1] != found.shape[1]  # gradients of keys are sums over heads
    if whole and grad is not None:
        own_grad = grad[batch, head].double()
        of_weights = product64(own_grad, values)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        wanted = [product64(of_scores, keys.t()) * scale]
        if not shared:
            wanted += [product64(of_scores.t(), query.t()) * scale, product64(weights.t(), own_grad.t())]
        names = ("grad_query", "grad_key", "grad_value")
        pairs += [
            (name, own[batch, head].double(), exact)
            for name, own, exact in zip(names, grads, wanted, strict=False)
            if own is not None
        ]
    allowed = _ATTENTION_STEPS * STEPS[found.dtype]
    for name, written_part, exact in pairs:
        # A row is what one block of a kernel writes; the smallest are measured against all.
        norms = exact.norm(dim=-1)
        error = float(((written_part - exact).norm(dim=-1) / (norms + norms.square().mean().sqrt() + 1e-30)).max())
        if not error <= allowed:
            return f"rows of its {name} are {error:.1e} off, where the formats explain {allowed / _ATTENTION_STEPS:.0e}"
    return ""
