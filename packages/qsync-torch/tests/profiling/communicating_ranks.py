"""What one of three ranks runs, over gloo: cases of measuring communication; prints as JSON what each case gave or raised here.

``python communicating_ranks.py RANK FOLDER`` runs all cases of :data:`CASES` in one process group.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from qsync_core.artifacts.codec import to_plain
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import contention
from qsync_torch.profiling.communication import MAX_CTAS, ProcessGroups, measure_communication
from qsync_torch.profiling.contention import measure_beside_compute, measure_slowdown
from qsync_torch.tracing.trace import trace

WORLD_SIZE = 3
COMPUTE_S = 0.05
ALONE_NS = 1000
OPEN_NS = {0: 1250, 1: 1250, 2: 2000}
SPIN_NS = 10


def job(buffers: bool) -> Job:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(5) if buffers else nn.ReLU()
    return Job(
        "tiny",
        nn.Sequential(nn.Linear(6, 5), middle, nn.Linear(5, 3)),
        lambda step, size: Batch((torch.randn(size, 6),), target=torch.arange(size) % 3),
        lambda output, batch: nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def measure(rank: int, *, buffers: bool = True, **changed: Any) -> Any:
    made = job(buffers)
    groups = {0: "train", 1: "infer", 2: "infer"}
    settings = {"group": groups[rank], "counts": {"train": 1, "infer": 2}, **changed}
    return to_plain(measure_communication(made, trace(made), **settings))


def measure_pair(rank: int) -> Any:
    with ProcessGroups.of([1, 2]) as pair:
        return measure(rank, counts={"infer": 2}, among=pair) if rank else None


def groups_again_and_again(rank: int) -> Any:
    """What each group finds in its store of what the ranks of an earlier one left there, as NCCL leaves its identifier."""
    new_group, found = dist.new_group, []

    def of_gloo(ranks: Any, backend: Any = None, pg_options: Any = None, **more: Any) -> Any:
        return new_group(ranks, **more)

    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(dist, "new_group", of_gloo),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch("qsync_torch.profiling.communication.nccl_options"),
    ):
        for ranks in ([1, 2], [1, 2], [0, 1], [1, 2]):
            with ProcessGroups.of(ranks) as made:
                for max_ctas in MAX_CTAS if rank in ranks else ():
                    with made.communicator(max_ctas, torch.device("cpu")) as group:
                        store = group.get_group_store()
                        found.append(store.check(["identifier"]))
                        dist.barrier(group)
                        store.set("identifier", "of a listener that is closed")
    return found


class ScriptedBackward:
    """Compute of given times in the place of a GPU's; what it is asked to do and whether a collective is open are written down."""

    spin_ns = SPIN_NS

    def __init__(self, rank: int, *, until_it_holds: float = 0.0, fails: str = "") -> None:
        self.rank, self.until_it_holds, self.fails = rank, until_it_holds, fails
        self.said: list[str] = []
        self.runs = 0

    def prepare(self) -> None:
        self.said.append("prepare")
        if self.rank == 1 and self.fails == "prepare":
            raise RuntimeError("no memory is left")

    def run(self) -> int:
        self.runs += 1
        is_open = self.runs % 2 == 0  # each sample has one run alone, and one while a collective is open
        self.said.append("open" if is_open else "alone")
        if self.rank == 1 and self.fails == self.said[-1]:
            raise RuntimeError("no memory is left")
        if is_open:
            time.sleep(COMPUTE_S)
        return OPEN_NS[self.rank] if is_open else ALONE_NS

    def issue(self) -> None:
        self.said.append("issue")

    def spin(self, duration_ns: float) -> None:
        self.said.append(f"hold {duration_ns:.0f}")
        if duration_ns >= self.until_it_holds:
            time.sleep(3 * COMPUTE_S)

    def wait(self) -> None:
        pass


def slowdown(rank: int, measuring: list[int], **script: Any) -> Any:
    backward = ScriptedBackward(rank, **script)
    tensor = torch.ones(8)
    found = measure_slowdown(backward, GROUP[0], tensor, measuring, "communicate")
    return [found.share, found.is_bound, backward.said]


@contextmanager
def scripted_cuda(said: list[str], elapsed_ms: list[float]) -> Iterator[None]:
    """Streams and events without a GPU: the order of work is written down, and events are as far apart as the script says."""
    times, reduce = iter(elapsed_ms), dist.all_reduce

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("time")

        def elapsed_time(self, end: Event) -> float:
            return next(times)

    @contextmanager
    def stream(side: Any) -> Iterator[None]:
        said.append("on the side:")
        yield
        said.append("beside it:")

    def all_reduce(tensor: torch.Tensor, group: Any = None, **more: Any) -> Any:
        if group is not None:
            said.append(f"all-reduce of {tensor.numel()}")
        return reduce(tensor, group=group, **more)

    side = SimpleNamespace(wait_event=lambda event: said.append("wait for it"))
    with (
        mock.patch.multiple(torch.cuda, Event=Event, Stream=lambda device: side, stream=stream),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield


COMPUTE_MS = {0: 12.0, 1: 10.0, 2: 14.0}
ELAPSED_MS = {0: (50.0, 2.0, 6.0), 1: (50.0, 4.0, 8.0), 2: (50.0, 8.0, 12.0)}
"""Of two all-reduces, in each sample."""
LONGER_MS = {0: (9.0, 1.0, 3.0), 1: (9.0, 0.0, -1.0), 2: (9.0, 8.0, 24.0)}
"""Of compute, likewise."""


def beside_compute(rank: int, alone_ns: int, **script: Any) -> Any:
    backward, alone_ms = ScriptedBackward(rank, **script), COMPUTE_MS[rank]
    elapsed = [ms for taken, more in zip(ELAPSED_MS[rank], LONGER_MS[rank], strict=True) for ms in (taken, alone_ms + more)]
    with scripted_cuda(backward.said, elapsed):
        found = measure_beside_compute(backward, GROUP[0], torch.ones(8), alone_ns, round(alone_ms * 1e6), "communicate")
    return [found.factor, found.lost, backward.said]


GROUP: list[dist.ProcessGroup] = []
FIRST_HOLD_NS = contention._HOLD * (ALONE_NS + SPIN_NS) + contention._HOLD_MORE_NS
CASES: dict[str, Callable[[int], Any]] = {
    "with_buffers": lambda rank: measure(rank),
    "without_buffers": lambda rank: measure(rank, buffers=False),
    "pair": measure_pair,
    "groups_again_and_again": groups_again_and_again,
    "other_graph": lambda rank: measure(rank, buffers=rank != 1),
    "other_counts": lambda rank: measure(rank, counts={"train": 2, "infer": 1}),
    "no_such_group_here": lambda rank: measure(rank, counts={"train": 1, "infer": 2, "more": 1}),
    "other_shares": lambda rank: measure(rank, share=0.5 if rank == 2 else 1.0),
    "other_channels": lambda rank: measure(rank),
    "one_computes": lambda rank: slowdown(rank, [0]),
    "two_compute": lambda rank: slowdown(rank, [1, 2]),
    "too_short_once": lambda rank: slowdown(rank, [0], until_it_holds=FIRST_HOLD_NS + 1),
    "never_held": lambda rank: slowdown(rank, [0], until_it_holds=float("inf")),
    "fails_alone": lambda rank: slowdown(rank, [1], fails="alone"),
    "fails_while_open": lambda rank: slowdown(rank, [1], fails="open"),
    "all_compute": lambda rank: beside_compute(rank, 2_000_000),
    "no_memory_to_prepare": lambda rank: beside_compute(rank, 2_000_000, fails="prepare"),
    "compute_does_not_matter": lambda rank: beside_compute(rank, 10_000_000),
    "one_computes_again": lambda rank: slowdown(rank, [0]),
}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )
    GROUP.append(dist.new_group())
    found = {}
    for name, case in CASES.items():
        if name == "other_channels" and rank == 1:
            os.environ["NCCL_MAX_CTAS"] = "2"
        try:
            found[name] = case(rank)
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        os.environ.pop("NCCL_MAX_CTAS", None)
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
