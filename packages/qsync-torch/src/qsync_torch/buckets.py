"""Gradient buckets as DistributedDataParallel forms them after its first iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from qsync_core.dag import Bucket

MEBIBYTE = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25
"""DistributedDataParallel's own default; with it the first bucket is smaller (1 MiB), so that communication starts early."""


def form_buckets(
    parameters: Sequence[tuple[str, torch.Tensor]],
    gradient_order: Sequence[str],
    bucket_cap_mb: float | None = None,
) -> tuple[Bucket, ...]:
    """The buckets, first ready first.

    After the first backward pass the reducer packs parameters again in the order in which their gradients became ready
    (``Reducer::rebuild_buckets``).  It does not when some parameter got no gradient (``find_unused_parameters=True``): then the
    first buckets stay, which are packed in the order of definition and reduced last to first.

    Args:
        parameters: ``named_parameters`` that require a gradient, tied ones once; only sizes and dtypes are used.
        gradient_order: names in the order in which gradients become ready.
        bucket_cap_mb: DistributedDataParallel's argument of that name, in MiB; None for its default.
    """
    tensors = dict(parameters)
    cap = int((DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MEBIBYTE)
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, cap] if bucket_cap_mb is None else [cap]
    if set(gradient_order) == set(tensors):
        names = list(gradient_order)
        ordered = [tensors[name] for name in names]
        # With indices given, the function keeps the order of its input instead of sorting buckets by definition.
        assigned, _ = dist._compute_bucket_assignment_by_size(ordered, limits, [], list(range(len(ordered))))
    else:
        names = list(tensors)
        assigned, _ = dist._compute_bucket_assignment_by_size(list(tensors.values()), limits)
        assigned = assigned[::-1]
    return tuple(
        Bucket(
            parameters=tuple(names[index] for index in indices),
            nbytes=sum(tensors[names[index]].numel() * tensors[names[index]].element_size() for index in indices),
        )
        for indices in assigned
    )
