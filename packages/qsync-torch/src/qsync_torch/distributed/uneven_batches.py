"""Which samples each rank trains on where ranks have local batches of different sizes (docs/uneven-batches.md#samples)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from qsync_core.errors import PlanError
from qsync_torch.distributed.process_group import own_rank


def split_samples(samples: int, batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Cut so many samples into parts as large as the local batches are to each other, in whole numbers.

    Whole global batches give every rank its local batch that many times.  Of another number each rank gets its share rounded down,
    and the largest remainders one sample more, the first rank of equal ones; no rank is left without a sample where there are as
    many samples as ranks.

    Args:
        batch_sizes: local batch of every rank, at least 1.
    """
    whole = sum(batch_sizes)
    parts = [samples * size // whole for size in batch_sizes]
    by_remainder = sorted(range(len(parts)), key=lambda rank: (-(samples * batch_sizes[rank] % whole), rank))
    for rank in by_remainder[: samples - sum(parts)]:
        parts[rank] += 1
    if samples >= len(parts):
        while 0 in parts:
            parts[parts.index(max(parts))] -= 1
            parts[parts.index(0)] += 1
    return tuple(parts)


class UnevenBatchSampler(Sampler[list[int]]):
    """Batches of this rank's size, such that all ranks together go through the data set once in an epoch.

    Every global batch is the next slice of one permutation, which depends on ``seed``, epoch and the data set's length alone.  It
    is dealt to the ranks one sample each, in rank order, round after round, and a rank whose local batch is full is passed over.
    With equal local batches these are the batches of PyTorch's ``DistributedSampler`` and ``BatchSampler``, but for the end of an
    epoch: no sample is repeated to fill it up, and the last global batch is smaller (:func:`split_samples`).

    Use it on all ranks::

        loader = DataLoader(dataset, batch_sampler=UnevenBatchSampler(dataset, [40, 24]))

    Args:
        dataset: anything with a length.
        batch_sizes: local batch of every rank, in rank order.
        rank: which of them this is; by default this process's rank in its job.
        shuffle: a new permutation in every epoch; otherwise the data set's own order.
        seed: of the permutations, equal on all ranks.
        drop_last: leave out the samples at the end of an epoch that do not fill a global batch.
        join: the loop runs inside ``with ddp.join():``, so that ranks without a sample of the last global batch may end before it.

    Raises:
        PlanError: for batch sizes that are not positive whole numbers or none for this rank, and without ``join`` or ``drop_last``
            where the last global batch has fewer samples than the job has ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_sizes: Sequence[int],
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        join: bool = False,
    ) -> None:
        self.batch_sizes = tuple(batch_sizes)
        if rank is None:
            rank = own_rank()
        if not self.batch_sizes or not all(isinstance(size, int) and size > 0 for size in self.batch_sizes):
            raise PlanError(f"every rank has a local batch of at least 1 sample, got {list(batch_sizes)}")
        if not 0 <= rank < len(self.batch_sizes):
            raise PlanError(f"there is no local batch for rank {rank}: got {len(self.batch_sizes)}, {list(batch_sizes)}")
        self.rank, self.epoch, self.first_sample = rank, 0, 0
        self._samples, self._shuffle, self._seed, self._drop_last, self._join = len(dataset), shuffle, seed, drop_last, join
        self._check_last(0)

    @property
    def global_batch(self) -> int:
        """Samples of one step on all ranks."""
        return sum(self.batch_sizes)

    def set_epoch(self, epoch: int, first_sample: int = 0) -> None:
        """Choose the epoch of the next iteration, and where in it that begins.

        Args:
            epoch: picks the permutation.
            first_sample: how many samples of this epoch all ranks together have trained on already: steps × ``global_batch`` of the
                run that is resumed, whatever its number of ranks and batches was.

        Raises:
            PlanError: for a place outside the data set, and as the constructor does for the last global batch.
        """
        if not 0 <= first_sample <= self._samples:
            raise PlanError(f"an epoch has {self._samples} samples, and cannot begin after {first_sample} of them")
        self._check_last(first_sample)
        self.epoch, self.first_sample = epoch, first_sample

    def __len__(self) -> int:
        """Batches that this rank has left in the epoch."""
        steps, rest = divmod(self._samples - self.first_sample, self.global_batch)
        return steps + bool(not self._drop_last and split_samples(rest, self.batch_sizes)[self.rank])

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(len(self)):
            start = self.first_sample + step * self.global_batch
            samples = order[start : start + self.global_batch]
            sizes = split_samples(len(samples), self.batch_sizes)
            turns = sorted((turn, rank) for rank, size in enumerate(sizes) for turn in range(size))
            yield [index for index, (_, rank) in zip(samples, turns, strict=True) if rank == self.rank]

    def _order(self) -> list[int]:
        """The epoch's permutation; that of PyTorch's ``DistributedSampler`` with the same seed."""
        if not self._shuffle:
            return list(range(self._samples))
        found: list[int] = torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._seed + self.epoch)).tolist()
        return found

    def _check_last(self, first_sample: int) -> None:
        rest = (self._samples - first_sample) % self.global_batch
        if rest and not self._drop_last and not self._join and 0 in split_samples(rest, self.batch_sizes):
            raise PlanError(
                f"the last global batch of an epoch of {self._samples - first_sample} samples has {rest} for "
                f"{len(self.batch_sizes)} ranks, and a rank without any would leave the others waiting: leave it out with "
                "drop_last=True, or run the loop inside 'with ddp.join():' and say join=True"
            )
