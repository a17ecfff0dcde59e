"""Work: three integers stand for any sequence of kernels, checked against running them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qsync_planner.replayer.max_plus import NOTHING, Work, device_only, kernel, sequence

KERNELS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12)


def run(work: Work, cpu: int, gpu: int) -> tuple[int, int]:
    return cpu + work.dispatch_ns, max(gpu + work.compute_ns, cpu + work.chain_ns)


@given(KERNELS, st.integers(0, 200), st.integers(0, 200))
def test_a_sequence_equals_its_kernels_one_by_one(kernels: list[tuple[int, int]], cpu: int, gpu: int) -> None:
    expected_cpu, expected_gpu = cpu, gpu
    for dispatch, compute in kernels:
        if dispatch or compute:
            expected_cpu += dispatch
            expected_gpu = max(expected_gpu, expected_cpu) + compute
    assert run(sequence(kernel(d, c) for d, c in kernels), cpu, gpu) == (expected_cpu, expected_gpu)


@given(KERNELS, KERNELS)
def test_sequences_compose(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    whole = sequence(kernel(d, c) for d, c in a + b)
    assert sequence(kernel(d, c) for d, c in a).then(sequence(kernel(d, c) for d, c in b)) == whole


def test_nothing_changes_nothing_and_free_kernels_are_nothing() -> None:
    assert run(NOTHING, 5, 3) == (5, 3)
    assert kernel(0, 0) == NOTHING


def test_work_of_the_device_alone_does_not_wait_for_the_cpu() -> None:
    assert run(device_only(10), 100, 3) == (100, 13)
