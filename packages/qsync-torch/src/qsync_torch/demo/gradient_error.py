"""How far a plan moves the weight gradients: the quantity whose square Ω estimates (DESIGN 6.1), measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qsync_torch.job import Batch


def gradient_error(model: nn.Module, reference: nn.Module, batches: Sequence[Batch], loss: Callable[[Any, Batch], Tensor]) -> float:
    """‖g − g_ref‖ / ‖g_ref‖ over all weight gradients of some batches, both models at the reference's weights.

    Args:
        model: runs under a plan; it is left as it was found.
        reference: the same model in full precision; left as it was found.
        batches: what both see; dropout draws the same masks in both.
        loss: of an output and its batch.
    """
    states = [copy.deepcopy(entry.state_dict()) for entry in (model, reference)]
    difference = norm = 0.0
    try:
        for seed, batch in enumerate(batches):
            model.load_state_dict(states[1])
            reference.load_state_dict(states[1])
            got, expected = (_gradients(entry, batch, loss, seed) for entry in (model, reference))
            difference += sum(float((g - e).square().sum()) for g, e in zip(got, expected, strict=True))
            norm += sum(float(e.square().sum()) for e in expected)
    finally:
        model.load_state_dict(states[0])
        reference.load_state_dict(states[1])
    return (difference / norm) ** 0.5 if norm else 0.0


def _gradients(model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], Tensor], seed: int) -> list[Tensor]:
    """Asked for directly, because a backward pass into ``.grad`` would start DDP's all-reduces."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        value = loss(model(*batch.args, **batch.kwargs), batch)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.to(torch.float32) for p, g in zip(parameters, found, strict=True)]
