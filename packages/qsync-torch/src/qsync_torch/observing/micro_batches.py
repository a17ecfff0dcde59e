"""Splitting a batch into parts whose losses add up to that of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

from qsync_torch.job import Batch


def split(batch: Batch, parts: int, *, mean: bool) -> Iterator[tuple[Batch, float]]:
    """Parts of a batch along dimension 0, each with the weight of its loss in the loss of the whole.

    Args:
        batch: its tensors of ``batch.size`` rows are split; others belong to every part.
        parts: at least 1; some fewer where the batch has fewer samples.
        mean: whether the loss is a mean over samples (a sum otherwise).
    """
    size = batch.size
    if parts <= 1 or size <= 1:
        yield batch, 1.0
        return
    for rows in torch.arange(size).tensor_split(min(parts, size)):
        first, last = int(rows[0]), int(rows[-1]) + 1

        def take(leaf: object, first: int = first, last: int = last) -> object:
            return leaf[first:last] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

        args, kwargs, target = pytree.tree_map(take, (batch.args, batch.kwargs, batch.target))
        yield Batch(args, kwargs, target), (last - first) / size if mean else 1.0
