"""What reading a file takes in memory, of files that are as dense as msgpack allows."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from artifact_examples import examples
from artifact_mutations import HEADER_BYTES, reseal

from qsync_core.artifacts import files as artifact
from qsync_core.errors import ArtifactError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline

MOST = 10
"""Bytes of memory above the start for one of the file."""
CONTENT_BYTES = 1 << 20
ITEMS = 2_000
"""Of one list, few enough that lists as such are taken."""


def words(length: int, start: int = 0) -> itertools.islice[str]:
    return itertools.islice(map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz0123456789", repeat=length)), start, None)


DENSE: dict[str, Callable[[int], object]] = {
    "small mappings": lambda number: [{"a": 1} for _ in range(ITEMS)],
    "empty mappings": lambda number: [{} for _ in range(ITEMS)],
    "short strings": lambda number: list(itertools.islice(words(2), ITEMS)),
    "integers": lambda number: [300] * ITEMS,
    "cached integers": lambda number: [1] * ITEMS,
    "distinct keys": lambda number: dict.fromkeys(itertools.islice(words(4, number * ITEMS), ITEMS), 1),
    "mappings of distinct keys": lambda number: [{key: 1} for key in itertools.islice(words(4, number * ITEMS), ITEMS)],
    "nested": lambda number: [[[[[[[[]]]]]]] for _ in range(ITEMS)],
}


def peak_of(data: bytes) -> tuple[int, ArtifactError | None]:
    """The most memory above the start that reading takes, and the error it ends with."""
    gc.collect()
    tracemalloc.start()
    error = None
    try:
        artifact.from_bytes(data)
    except ArtifactError as refused:
        error = refused
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, error


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_file_takes_at_most_ten_times_its_size(name):
    packed, number = [], 0
    while sum(map(len, packed)) < CONTENT_BYTES:
        packed.append(msgpack.packb(DENSE[name](number)))
        number += 1
    front = artifact.to_bytes(examples()[Timeline])[:HEADER_BYTES]
    data = reseal(front + b"\xdd" + len(packed).to_bytes(4, "big") + b"".join(packed))
    peak, error = peak_of(data)
    assert error is not None
    assert peak <= MOST * len(data), f"{peak / len(data):.1f} times"


@pytest.mark.parametrize("kind", [PrecisionDag, Timeline, Sensitivity])
def test_the_densest_artifacts_are_read_within_the_same_bound(kind):
    data = artifact.to_bytes(examples(layers=60)[kind])
    peak, error = peak_of(data)
    assert error is None
    assert peak <= MOST * len(data), f"{peak / len(data):.1f} times"
