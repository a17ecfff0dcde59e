"""What ranks hear of one that ends without a sentence of its own: each rank a thread, over one store."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_torch.distributed import exchange
from qsync_torch.distributed.mailbox import Mailbox
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
            with together("preparing", group=Mailbox(rank, range(2), store, 10.0), timeout_s=10.0):
                if rank:
                    raise error
        except BaseException as raised:
            return raised
        return None

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert (str(first), second) == (heard, error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "rank 1 did not reach the line of train.py within 0.2 s of rank 0: .* call it on every rank"),
        (ValueError("no data"), "rank 0 fails with ValueError in the line of train.py: no data"),
    ],
)
def test_a_rank_that_hangs_in_a_block_that_the_others_have_left_ends_with_the_sentence(error, said, monkeypatch, capfd):
    monkeypatch.setattr(exchange, "_GRACE_S", 0.0)
    store, ended = dist.HashStore(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())

    def run(rank: int) -> None:
        with together(
            "the line of train.py", group=Mailbox(rank, range(2), store, 10.0), timeout_s=0.2 if rank == 0 else 30.0, may_hang=True
        ):
            if rank:
                assert ended.wait(30)  # as in a collective
            elif error:
                raise error

    with ThreadPoolExecutor(2) as pool:
        left = pool.submit(run, 0)
        hung = pool.submit(run, 1)
        for future in (left, hung):
            with pytest.raises((RankError, ValueError)):
                future.result()
    assert re.search(f"^error: {said}", capfd.readouterr().err, re.MULTILINE)  # where PyTorch may write too


def test_who_is_interrupted_while_it_waits_says_so_to_the_one_that_it_waits_for(monkeypatch):
    store, waits = dist.HashStore(), threading.Event()
    hear = exchange.Exchange.hear

    def interrupted(self):
        if self.rank == 0:
            return hear(self)
        waits.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange.Exchange, "hear", interrupted)

    def run(rank: int) -> None:
        with together("preparing", group=Mailbox(rank, range(2), store, 60.0), timeout_s=60.0, slow=True):
            if rank == 0:
                assert waits.wait(30)

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(run, rank) for rank in range(2))
        with pytest.raises(KeyboardInterrupt):
            second.result()
        with pytest.raises(RankError, match=r"^rank 1 fails with an interruption \(Ctrl-C\) in preparing$"):
            first.result(timeout=30)


def test_a_rank_that_was_never_seen_is_told_to_be_started():
    store = dist.HashStore()
    said = r"^rank 1 did not come to preparing within 0\.2 s of rank 0: start it, or see what was printed there last"
    with (
        pytest.raises(RankError, match=said),
        together("preparing", group=Mailbox(0, range(2), store, 10.0), timeout_s=0.2, slow=True),
    ):
        pass


def test_who_ends_after_its_report_is_named_by_those_that_wait_for_it_to_hear_theirs(monkeypatch):
    monkeypatch.setattr(exchange, "_GRACE_S", 0.0)
    store = dist.HashStore()
    exchange.Exchange(Mailbox(1, range(2), store, 10.0), "preparing", 10.0).say(exchange.Report("preparing"))
    said = r"^rank 1 gave no sign of life for 0\.2 s while rank 0 waited for it in preparing: its process has ended"
    members = Mailbox(0, range(2), store, 10.0)
    with pytest.raises(RankError, match=said), together("preparing", group=members, timeout_s=0.2):
        pass
