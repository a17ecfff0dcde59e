"""What ranks leave for each other: by name, rank and purpose; bytes of any length; signs of life."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from qsync_torch.distributed import mailbox
from qsync_torch.distributed.mailbox import Mailbox, beside


@pytest.fixture
def boxes():
    store = dist.HashStore()
    return [Mailbox(rank, range(3), store, 10.0) for rank in range(3)]


def test_who_has_said_nothing_is_missing_and_purposes_do_not_meet(boxes):
    boxes[0].say("report", {"a": [1, "x"]})
    boxes[2].say("report", "old")
    boxes[2].say("report", None)
    assert boxes[1].heard("report") == {0: {"a": [1, "x"]}, 2: None}
    assert boxes[1].missing("report") == [1]
    assert boxes[1].heard("report", [1, 2]) == {2: None}
    assert boxes[1].missing("report", [0, 2]) == []
    assert boxes[1].part("another").heard("report") == {}
    boxes[1].forget("report", rank=0)
    assert boxes[0].missing("report") == [0, 1]


def test_who_waits_is_woken_by_the_last_one_or_by_what_ends_the_waiting(boxes):
    boxes[0].say("here")
    assert not boxes[0].wait("here", time.monotonic())
    assert boxes[0].wait("here", time.monotonic(), [0])
    with beside("others", lambda done: [box.say("here") for box in boxes[1:]]):
        assert boxes[0].wait("here", time.monotonic() + 30)
    boxes[1].post("over", "rank 2 is missing")
    assert boxes[0].wait("there", time.monotonic() + 30, or_posted="over")
    assert boxes[0].read("over") == "rank 2 is missing"


def test_bytes_longer_than_a_value_may_be_arrive_whole_and_go(boxes, monkeypatch):
    monkeypatch.setattr(mailbox, "PIECE_BYTES", 5)
    sent = bytes(range(12))
    pieces = boxes[1].send("profile", sent)
    assert pieces == 3
    assert boxes[0].take("profile", 1, pieces) == sent
    boxes[1].unsend("profile", pieces)
    assert not any(boxes[0].posted(f"profile/1/{piece}") for piece in range(pieces))


def test_a_process_that_lives_is_counted_until_it_is_done(boxes):
    beaten = threading.Event()
    with beside("qsync-alive", lambda done: boxes[1].beat("alive", 0.01, done)):
        while boxes[0].beats("alive", [1])[1] < 3:
            assert not beaten.wait(0.01)
    last = boxes[0].beats("alive", [0, 1])
    assert last[0] == 0
    assert boxes[0].beats("alive", [0, 1]) == last
