"""Ranks that wait for a frozen, missing or failed one, a stopped store or a foreign program: each wait ends with a sentence."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext, redirect_stderr

import pytest
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_torch.distributed import bounded_store, exchange
from qsync_torch.distributed.bounded_store import BoundedStore, StoreSilent
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.meeting import Place
from qsync_torch.distributed.ranks import told_by_all
from qsync_torch.distributed.watch import _Watch, watched

HOLDER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
JSON_STATE = json.dumps({"beats": 1})
SILENT = "rank 1 gave no sign of life for 2 s while rank 0 waited for it in qsync prepare: its process has ended or hangs"


@pytest.fixture(autouse=True)
def answering():
    """No test finds that the store of another one was silent."""
    bounded_store._ANSWERS.set()


@pytest.fixture
def ended(monkeypatch):
    """Set where the process would have ended."""
    monkeypatch.setenv("QSYNC_RANK_TIMEOUT_S", "2")
    monkeypatch.setattr(exchange, "_GRACE_S", 0.0)
    found = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: found.set())
    return found


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "rank 1 did not reach qsync prepare within 2 s of rank 0: .* set QSYNC_RANK_TIMEOUT_S to more seconds"),
        (JSON_STATE, f"{SILENT}.* set QSYNC_RANK_TIMEOUT_S to more seconds"),
        (json.dumps({"left": "RankError: no such device"}), "rank 1 has failed in qsync prepare .RankError: no such device.: see"),
        (json.dumps({"left": "RankError: \x1b[2J"}), r"rank 1 has failed in qsync prepare .RankError: \\x1b\[2J.: see"),
    ],
)
def test_a_rank_that_hangs_ends_where_another_is_missing_frozen_or_has_failed(state, said, ended, capfd):
    """Also while a library keeps for itself what is printed, as ``torch.export`` makes PyTorch do."""
    store = dist.HashStore()
    if state is not None:
        store.set("qsync/watch1/1", state)
    with redirect_stderr(io.StringIO()), watched("qsync prepare", Mailbox(0, range(2), store, 10.0)):
        assert ended.wait(30)  # as in a collective
    assert re.search(f"^error: {said}", capfd.readouterr().err, re.MULTILINE)  # where PyTorch may write too


@pytest.mark.usefixtures("ended")
def test_ranks_that_were_killed_are_told_from_those_that_live_and_those_that_have_left():
    store = dist.HashStore()
    store.set("qsync/watch1/1", JSON_STATE)
    store.set("qsync/watch1/3", json.dumps({"left": "RankError: another rank has failed"}))
    first, third = (Mailbox(rank, range(4), store, 10.0) for rank in (0, 2))
    with watched("qsync prepare", first) as gone, watched("qsync prepare", third) as gone_for_third:
        assert (gone(), gone_for_third()) == ([1], [1])
    with watched("qsync prepare", None) as gone:
        assert gone() == []


def test_a_rank_that_is_done_is_not_waited_for():
    store = dist.HashStore()
    with watched("qsync prepare", Mailbox(1, range(2), store, 10.0)):
        store.set("qsync/watch1/0", json.dumps({"left": ""}))
    watch = _Watch("qsync prepare", Mailbox(0, range(2), store, 10.0))
    long_ago = {1: float("-inf")}
    assert watch._failed({1: b""}, long_ago) == ""
    assert long_ago == {}


@pytest.fixture
def stopped_holder():
    """The port of a store whose process is stopped once the test has connected, and what stops it."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), lambda: process.send_signal(signal.SIGSTOP)
        process.kill()


@pytest.mark.distributed
def test_calls_of_a_store_whose_process_is_stopped_end_with_who_it_is(stopped_holder, monkeypatch):
    port, stop = stopped_holder
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    members = Mailbox(0, range(2), store, 10.0)
    stop()
    monkeypatch.setenv("QSYNC_RANK_TIMEOUT_S", "1")
    said = "the process that holds the process group's store is silent while this rank is in apply_ .no answer for 1 s.: it is rank"
    with pytest.raises(RankError, match=said):
        told_by_all("apply_", {}, members)
    with pytest.raises(StoreSilent):
        BoundedStore(store).check(["a key"])
    said = "rank 1 waited 1 s for the torchrun of node rank 0, which keeps the store there .what listens there says nothing, as"
    with pytest.raises(RankError, match=said):
        Place(1, 2, "127.0.0.1", port, agent_store=True).store(holds=True)


def test_after_a_silence_a_call_has_a_tenth_of_the_time_until_one_is_answered(monkeypatch):
    answers, limits = [False, False, True, True], []

    def within(limit_s, call):
        limits.append(limit_s)
        if answers[len(limits) - 1]:
            return call()
        raise TimeoutError

    monkeypatch.setenv("QSYNC_RANK_TIMEOUT_S", "20")
    monkeypatch.setattr(bounded_store, "within", within)
    store = BoundedStore(dist.HashStore())
    for answered in answers:
        with nullcontext() if answered else pytest.raises(StoreSilent, match="no answer for 20 s"):
            store.add("a key", 1)
    assert limits == [20, 2, 2, 20]


@pytest.mark.parametrize("who", ["a foreign program", "an address that does not resolve", "rank 0 that never comes"])
def test_a_rank_that_cannot_meet_the_others_says_for_whom_it_waited(who, monkeypatch):
    monkeypatch.setenv("QSYNC_RANK_TIMEOUT_S", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if who == "rank 0 that never comes":
            silent.close()
        host = "no-such-host.invalid" if "resolve" in who else "127.0.0.1"
        said = (
            f"the ranks of this job did not meet at {host}:{port}: rank 1 waited 0.5 s for rank 0, which keeps the store there .*"
        )
        with pytest.raises(RankError, match=said + "where rank 0 takes longer to come, set QSYNC_RANK_TIMEOUT_S to more seconds"):
            Place(1, 2, host, port, agent_store=False).store(holds=True)
