"""How far a plan moves the weight gradients: the quantity whose square Ω estimates (docs/design/indicator.md#omega), measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qsync_torch.job import Batch


def gradient_errors(
    models: Mapping[str, nn.Module], reference: nn.Module, batches: Sequence[Batch], loss: Callable[[Any, Batch], Tensor]
) -> dict[str, float]:
    """‖g − g_ref‖ / ‖g_ref‖ over all weight gradients of some batches, every model at the reference's weights.

    Args:
        models: run under plans, by name; they are left as they were found.
        reference: the same model in full precision; left as it was found.
        batches: what all see; dropout draws the same masks in all.
        loss: of an output and its batch.
    """
    initial = {name: copy.deepcopy(model.state_dict()) for name, model in models.items()}
    at = copy.deepcopy(reference.state_dict())
    differences, norm = dict.fromkeys(models, 0.0), 0.0
    try:
        for seed, batch in enumerate(batches):
            reference.load_state_dict(at)
            expected = _gradients(reference, batch, loss, seed)
            norm += sum(float(e.square().sum()) for e in expected)
            for name, model in models.items():
                model.load_state_dict(at)
                got = _gradients(model, batch, loss, seed)
                differences[name] += sum(float((g - e).square().sum()) for g, e in zip(got, expected, strict=True))
    finally:
        for name, model in models.items():
            model.load_state_dict(initial[name])
        reference.load_state_dict(at)
    return {name: (difference / norm) ** 0.5 if norm else 0.0 for name, difference in differences.items()}


def _gradients(model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], Tensor], seed: int) -> list[Tensor]:
    """Asked for directly, because a backward pass into ``.grad`` would start DDP's all-reduces."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        value = loss(model(*batch.args, **batch.kwargs), batch)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.to(torch.float32) for p, g in zip(parameters, found, strict=True)]
