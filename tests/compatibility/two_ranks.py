"""Tests whose body runs on two ranks over gloo; all that are selected run in one pair of processes, in turn.

``python two_ranks.py RANK FOLDER MODULE:FUNCTION...`` is one rank; it writes what each body returned or raised.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from compatibility.page import row_of
from forked import run_forked

Body = Callable[[Path], Any]
TIMEOUT_S = 300


def _test(body: Body, check: Callable[[Any], None]) -> Callable[..., None]:
    def test(ranks: Mapping[str, Any]) -> None:
        check(ranks[name_of(body)])

    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    test.body = body  # type: ignore[attr-defined]
    return pytest.mark.distributed(test)


def on_two_ranks(body: Body) -> Callable[..., None]:
    """A test whose body returns on each rank by how much the feature differs from its reference, which must be 0: the same bits.

    The body gets a folder that both ranks see.
    """

    def check(outcomes: Any) -> None:
        assert outcomes == [0.0, 0.0]

    return _test(body, check)


def refused_on_two_ranks(body: Body) -> Callable[..., None]:
    """A test whose body is refused on every rank, with the sentences that the page quotes."""

    def check(outcomes: Any) -> None:
        sentences = row_of(f"{body.__module__.rpartition('.')[2]}.py::{body.__name__}").sentences
        assert sentences
        for outcome in outcomes:
            assert isinstance(outcome, str), outcomes
            assert any(sentence.search(outcome) for sentence in sentences), (outcomes, sentences)

    return _test(body, check)


def name_of(body: Body) -> str:
    """``module:function``, of a body or of its test."""
    return f"{body.__module__.rpartition('.')[2]}:{body.__name__}"


def run_bodies(names: Sequence[str], folder: Path) -> dict[str, list[Any]]:
    """By name, what a body returned on each rank: JSON, or ``Class: text`` of what it raised."""
    settings = {"GLOO_SOCKET_IFNAME": "lo", "QSYNC_RANK_TIMEOUT_S": "20", "OMP_NUM_THREADS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    commands = [["-m", "compatibility.two_ranks", str(rank), str(folder), *names] for rank in range(2)]
    ended = run_forked(commands, [os.environ | settings] * 2, cwd=Path.cwd(), timeout_s=TIMEOUT_S)
    outputs = [process.output for process in ended]
    print(*outputs, sep="\n")
    assert [process.status for process in ended] == [0, 0], "\n".join(outputs)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {name: [one[name] for one in found] for name in names}


def main() -> None:
    """One rank."""
    rank, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {}
    for name in names:
        module, _, function = name.partition(":")
        test = getattr(importlib.import_module(f"compatibility.{module}"), function)
        own = folder / function
        own.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = outcome_of(test.body, own)
        dist.barrier()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # without the destructors of wrappers and a process group, which now and then abort


def outcome_of(body: Body, folder: Path) -> Any:
    """What a body returned, or what it raised; where that was is printed."""
    try:
        return body(folder)
    except (Exception, pytest.fail.Exception) as error:  # one body's failure is not the others'
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
