"""What every rank says of how far it is, and how long each stage took."""

import pytest
import torch.distributed as dist

from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.prepare.board import Board, _Reader


def of_rank(rank, store, now, shown):
    members = None if store is None else Mailbox(rank, [0, 1], store, 10.0)
    return Board(members, clock=lambda: now[0], show=lambda *state: shown.append(state))


def pass_through(board, now, stage, updates, total):
    update = board.stage(stage)
    for seconds, done, what in updates:
        update(done, total, what)
        now[0] += seconds


PROFILE = [(2, 0, "operators: linear int8"), (3, 1, "operators: gelu"), (0.01, 2, "casts: x"), (4, 3, "whole step int8")]
TOLD = "profiling took 9.0 s (operators 5.0 s, whole step int8 4.0 s)"


@pytest.mark.parametrize("ends", ["with its last part", "with the next stage", "with the command"])
def test_a_stage_says_how_long_it_and_its_parts_took(ends):
    now, shown = [100.0], []
    board = of_rank(0, None, now, shown)
    pass_through(board, now, "profiling", PROFILE, 4)
    if ends == "with its last part":
        board.stage("profiling")(4, 4, "")
    elif ends == "with the next stage":
        board.stage("observing")(0, 1, "")
    else:
        board.end()
    assert (0, 1, 1, TOLD) in shown
    now[0] += 50  # which is spent on waiting for another rank
    board.stage("planning")(0, 1, "")
    now[0] += 1
    board.stage("planning")(1, 1, "")
    assert shown[-1] == (0, 1, 1, "planning took 1.0 s")


def test_rank_0_shows_how_long_the_stages_of_the_others_took_and_nothing_older_after_it():
    now, shown, store = [0.0], [], dist.HashStore()
    other = of_rank(1, store, now, [])
    other.label = "b, "
    pass_through(other, now, "profiling", PROFILE, 4)
    other.stage("profiling")(4, 4, "")
    first = of_rank(0, store, now, shown)
    reader, box = _Reader(first, [1]), first.members.part("qsync/prepare/board")
    reader._look(box, 1)
    assert shown == [(1, 1, 1, f"b, {TOLD}")]
    other.stage("observing")(0, 2, "warm-up")
    reader._look(box, 1)
    assert shown[1:] == [(1, 0, 2, "b, observing: warm-up")]
