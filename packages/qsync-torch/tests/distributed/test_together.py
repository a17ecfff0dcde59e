"""What ranks hear of one that ends without a sentence of its own: each rank a thread, over one store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from qsync_torch.distributed.exchange import Members
from qsync_torch.distributed.ranks import together


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (KeyboardInterrupt(), "rank 1 fails with an interruption (Ctrl-C) in preparing"),
        (MemoryError(), "rank 1 fails with MemoryError in preparing"),
        (ValueError("no data\nat all"), "rank 1 fails with ValueError in preparing: no data"),
    ],
)
def test_no_sentence_ends_with_a_colon(error, heard):
    store = dist.HashStore()

    def run(rank: int) -> BaseException | None:
        try:
            with together("preparing", group=Members(rank, range(2), store, 10.0), timeout_s=10.0):
                if rank:
                    raise error
        except BaseException as raised:
            return raised
        return None

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert (str(first), second) == (heard, error)
