"""Which samples each rank trains on, against PyTorch's own sampler and the laws that every cut must keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from qsync_core.errors import PlanError
from qsync_torch import UnevenBatchSampler
from qsync_torch.distributed.uneven_batches import split_samples

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(SIZES, st.integers(0, 200))
def test_a_split_has_every_sample_once_and_shares_within_one_sample(sizes, samples):
    parts, whole = split_samples(samples, sizes), sum(sizes)
    assert sum(parts) == samples
    if samples >= len(sizes):
        assert min(parts) >= 1
    if samples <= whole:
        assert all(part <= size for part, size in zip(parts, sizes, strict=True))
    if samples % whole == 0:
        assert parts == tuple(samples // whole * size for size in sizes)
    if min(samples * size // whole for size in sizes):
        assert all(abs(part - samples * size / whole) < 1 for part, size in zip(parts, sizes, strict=True))


def test_a_split_by_hand():
    assert split_samples(32, [40, 24]) == (20, 12)
    assert split_samples(5, [7, 3]) == (4, 1)  # 3.5 + 1.5: the first of equal remainders
    assert split_samples(10, [99, 1]) == (9, 1)  # 9.9 + 0.1: no rank without a sample
    assert split_samples(1, [3, 3]) == (1, 0)


def epoch_of(samples, sizes, *, epoch=0, first_sample=0, **options):
    """Every rank's batches."""
    found = []
    for rank in range(len(sizes)):
        sampler = UnevenBatchSampler(range(samples), sizes, rank, join=True, **options)
        sampler.set_epoch(epoch, first_sample)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        found.append(batches)
    return found


@given(SIZES, st.integers(0, 150), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_an_epoch_has_no_sample_twice_and_none_left_out(sizes, samples, seed, epoch, drop_last):
    ranks = epoch_of(samples, sizes, epoch=epoch, seed=seed, drop_last=drop_last)
    seen = [index for batches in ranks for batch in batches for index in batch]
    kept = samples - samples % sum(sizes) if drop_last else samples
    assert len(seen) == len(set(seen)) == kept
    assert set(seen) <= set(range(samples))
    for batches, size in zip(ranks, sizes, strict=True):
        full = batches if drop_last else batches[: samples // sum(sizes)]
        assert [len(batch) for batch in full] == [size] * (samples // sum(sizes))
        assert all(batches)  # a rank without a sample ends, it does not get an empty batch


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_with_equal_batches_it_is_pytorch_s_sampler(ranks, size, batches, epoch, shuffle):
    samples = ranks * size * batches
    ours = epoch_of(samples, [size] * ranks, epoch=epoch, seed=3, shuffle=shuffle)
    for rank in range(ranks):
        theirs = DistributedSampler(range(samples), ranks, rank, shuffle=shuffle, seed=3)
        theirs.set_epoch(epoch)
        assert ours[rank] == list(BatchSampler(theirs, size, drop_last=False))


@given(SIZES, SIZES, st.integers(1, 150), st.integers(0, 20))
def test_a_job_that_resumes_with_other_ranks_and_batches_finishes_the_epoch(before, after, samples, steps):
    done = min(steps, samples // sum(before))
    first = [index for batches in epoch_of(samples, before) for batch in batches[:done] for index in batch]
    rest = [i for batches in epoch_of(samples, after, first_sample=done * sum(before)) for batch in batches for i in batch]
    assert sorted(first + rest) == list(range(samples))


def test_a_loader_with_workers_gives_the_same_batches():
    sampler = UnevenBatchSampler(range(23), [3, 2], 1)
    loader = DataLoader(range(23), batch_sampler=sampler, num_workers=1)
    assert [batch.tolist() for batch in loader] == list(sampler)
    assert len(loader) == len(sampler) == 5
    sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] == list(sampler)


@pytest.mark.parametrize(
    "sizes, rank, options, message",
    [
        ([3, 0], 0, {}, r"every rank has a local batch of at least 1 sample, got \[3, 0\]"),
        ([], 0, {}, r"every rank has a local batch of at least 1 sample, got \[\]"),
        ([3, 2.5], 0, {}, r"at least 1 sample, got \[3, 2.5\]"),
        ([3, 2], 2, {}, r"there is no local batch for rank 2: got 2, \[3, 2\]"),
        (
            [3, 3],
            0,
            {},
            r"an epoch of 13 samples has 1 for 2 ranks, .* drop_last=True, or .* 'with ddp.join\(\):' and say join",
        ),
    ],
)
def test_batches_that_cannot_be_are_refused(sizes, rank, options, message):
    with pytest.raises(PlanError, match=message):
        UnevenBatchSampler(range(13), sizes, rank, **options)


def test_a_place_outside_the_epoch_is_refused():
    sampler = UnevenBatchSampler(range(12), [3, 3], 0)
    with pytest.raises(PlanError, match="an epoch has 12 samples, and cannot begin after 13 of them"):
        sampler.set_epoch(0, 13)
    with pytest.raises(PlanError, match="an epoch of 7 samples has 1 for 2 ranks"):
        sampler.set_epoch(0, 5)
    sampler.set_epoch(0, 12)
    assert list(sampler) == []
