"""Contenders in processes of their own, with steps that are sums."""

import os

import pytest
import torch

from eight_bit import in_turns
from eight_bit.in_turns import take_turns
from forked import SERVED


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    monkeypatch.setattr(in_turns, "STARTS", SERVED)


def step_of(folder, name, fails_until):
    """A step that leaves a line of its process; the first ones of a contender fail."""
    log = folder / name
    with log.open("a") as lines:
        lines.write("start\n")
    if log.read_text().count("start") <= fails_until:
        raise torch.OutOfMemoryError("out of memory")

    def step():
        with log.open("a") as lines:
            lines.write("step\n")

    return step


@pytest.mark.parametrize(("fails", "starts"), [(0, 1), (1, 2)])
def test_a_contender_takes_every_turn_and_is_started_again_once_it_failed(tmp_path, fails, starts):
    said = []
    contenders = {"a": (step_of, (tmp_path, "a", 0)), "b": (step_of, (tmp_path, "b", fails))}
    found = take_turns(contenders, blocks=3, steps=2, say=said.append)
    assert {name: len(turns.blocks) for name, turns in found.items()} == {"a": 3, "b": 3}
    lines = (tmp_path / "b").read_text().splitlines()
    assert (lines.count("start"), lines.count("step")) == (starts, 1 + 3 * 3)
    assert any("out of memory" in line for line in said) == bool(fails)


def test_one_that_never_starts_is_told_and_left_out(tmp_path):
    said = []
    contenders = {"a": (step_of, (tmp_path, "a", 0)), "b": (step_of, (tmp_path, "b", 9))}
    found = take_turns(contenders, blocks=1, steps=1, say=said.append)
    assert list(found) == ["a"]
    assert sum("out of memory" in line for line in said) == 2


def failing(steps, ends):
    """A step that fails, or ends its process, once it has run so often."""
    done = []

    def step():
        done.append(1)
        if len(done) > steps:
            if ends:
                os._exit(1)
            raise torch.OutOfMemoryError("out of memory")

    return step


@pytest.mark.parametrize("ends", [False, True])
def test_one_that_fails_in_a_later_turn_is_left_out_and_the_others_go_on(tmp_path, ends):
    said = []
    contenders = {name: (step_of, (tmp_path, name, 0)) for name in "ac"}
    contenders = {"a": contenders["a"], "b": (failing, (4, ends)), "c": contenders["c"]}
    found = take_turns(contenders, blocks=3, steps=2, say=said.append)
    assert {name: len(turns.blocks) for name, turns in found.items()} == {"a": 3, "c": 3}
    (line,) = [line for line in said if "left out" in line]
    assert line.startswith("b, left out in turn 2 of 3: ")
    assert ("out of memory" in line) != ends


def adding():
    """A step of two additions."""
    x = torch.zeros(3)

    def step():
        x.add_(1).add_(1)

    return step


def test_kernels_of_a_step_are_recorded_once_all_are_measured():
    contenders = {"a": (adding, ()), "b": (adding, ())}
    found = take_turns(contenders, blocks=1, steps=1, say=str, explain=lambda turns: [max(turns)])
    assert found["a"].kernels == ()
    assert [kernel.launches for kernel in found["b"].kernels if kernel.name == "aten::add_"] == [2]


def counted(folder):
    """A step that fails from the fourth time on, which is the first that is recorded."""

    def step():
        (folder / str(len(list(folder.iterdir())))).touch()
        if len(list(folder.iterdir())) > 3:
            raise RuntimeError("the profiler is gone")

    return step


def test_what_was_measured_counts_where_kernels_cannot_be_recorded(tmp_path):
    said = []
    found = take_turns({"a": (counted, (tmp_path,))}, blocks=1, steps=1, say=said.append, explain=list)
    assert len(found["a"].blocks) == 1
    assert found["a"].kernels == ()
    assert "a, its kernels: " in said[-1]
    assert "the profiler is gone" in said[-1]


def waiting_of(folder):
    """A step that leaves what its process is told of compilers, and the first time fails."""
    with (folder / "told").open("a") as lines:
        lines.write(os.environ["QSYNC_WAIT_FOR_KERNELS"])
    if len((folder / "told").read_text()) == 1:
        raise RuntimeError("not yet")
    return lambda: None


def test_kernels_are_compiled_beside_the_first_start_and_awaited_by_the_second(tmp_path, monkeypatch):
    """Though the process that starts contenders waits for compilers, as benchmarks do: one by one they take minutes."""
    monkeypatch.setenv("QSYNC_WAIT_FOR_KERNELS", "1")
    assert take_turns({"a": (waiting_of, (tmp_path,))}, blocks=1, steps=1, say=str)
    assert (tmp_path / "told").read_text() == "01"
