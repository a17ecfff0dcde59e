"""Contenders of whole steps, each in a process of its own: they compile side by side, and train in turns on one device.

One whose CUTLASS kernels were compiled beside its first step is started again, so that it runs on them; so is one that failed, once
the others are ready: where all compile at once, memory may not do for all of their first steps.  What is started again waits for
compilers, so that it is measured on the kernels that are named, or says why it has none.  One that fails later is left out.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

from steps.roofline import Kernel, kernels_of, recorded

COMPILES = "qsync compiles"
"""Name of the threads that compile CUTLASS kernels beside a training."""
_KERNELS = -1
"""Asked for in place of steps: what kernels a step has."""
LIMIT_S = 400.0
"""How long a contender may take to answer."""
FAILURES = (RuntimeError, EOFError, OSError)
"""What a contender raises here that failed, that has ended, or that does not answer."""
GIB = 2.0**30
STARTS: multiprocessing.context.BaseContext = multiprocessing.get_context("spawn")
"""How processes start: as new ones, which share no memory of a GPU."""


@attrs.frozen
class Block:
    """Some steps of a contender: milliseconds of one, the peak of memory in GiB, and whether kernels were compiled beside them."""

    ms: float
    peak: float
    compiled: bool


@attrs.frozen
class Turns:
    """The blocks of a contender, measured in turns with the others', and the kernels of its step where these were asked for."""

    blocks: tuple[Block, ...]
    kernels: Sequence[Kernel] = ()

    @property
    def ms(self) -> float:
        """The median block's step."""
        return statistics.median(block.ms for block in self.blocks)

    @property
    def peak(self) -> float:
        """The highest of the blocks, GiB."""
        return max(block.peak for block in self.blocks)


def take_turns(
    contenders: Mapping[Any, tuple[Callable[..., Callable[[], None]], tuple[Any, ...]]],
    *,
    blocks: int,
    steps: int,
    say: Callable[[str], None] = print,
    explain: Callable[[Mapping[Any, Turns]], Iterable[Any]] = lambda found: (),
) -> dict[Any, Turns]:
    """Measure every contender that can be: a block of each in turn.

    Args:
        contenders: a function that makes a training step in its process, and its arguments; both are pickled.
        blocks: of each contender.
        steps: that are timed in a block, behind one that is not.
        say: told when a contender is ready, or why it is left out, at its first steps or in a later turn.
        explain: names those whose kernels are recorded once all are measured.
    """
    running = {name: _Contender(*made) for name, made in contenders.items()}
    found: dict[Any, list[Block]] = {name: [] for name in contenders}
    try:
        for contender in running.values():
            contender.ask(0)
        again = [name for name, contender in running.items() if not _ready(name, contender, say)]
        for name in again:  # on kernels that are there now, and in the memory that the others have given back
            running[name].stop()
            running[name] = _Contender(*contenders[name], waits=True)
            running[name].ask(0)
            if not _ready(name, running[name], say):
                running.pop(name).stop()
        for turn in range(1, blocks + 1):
            for name, contender in list(running.items()):
                try:
                    contender.ask(steps)
                    found[name].append(contender.answer())
                except FAILURES as error:  # ratios are of neighbouring blocks: those that it has count no more
                    say(f"{name}, left out in turn {turn} of {blocks}: {error}")
                    running.pop(name).stop()
        turns = {name: Turns(tuple(found[name])) for name in running}
        for name in explain(turns):
            try:
                turns[name] = attrs.evolve(turns[name], kernels=running[name].kernels())
            except FAILURES as error:  # what was measured counts all the same
                say(f"{name}, its kernels: {error}")
    finally:
        for contender in running.values():
            contender.stop()
    return turns


def _ready(name: Hashable, contender: _Contender, say: Callable[[str], None]) -> bool:
    """Wait for its first step, and say whether it can go on as it is."""
    try:
        compiled = contender.answer().compiled
    except FAILURES as error:
        say(f"{name}: {error}")
        return False
    say(f"{name}: {'compiled kernels' if compiled else 'ready'}")
    return not compiled


class _Contender:
    """A process that trains when it is asked to; ``waits``: for compilers, before its first step."""

    def __init__(self, make: Callable[..., Callable[[], None]], arguments: tuple[Any, ...], *, waits: bool = False) -> None:
        self._pipe, theirs = STARTS.Pipe()
        self._process = STARTS.Process(target=_serve, args=(theirs, make, arguments, waits), daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, steps: int) -> None:
        self._pipe.send(steps)

    def answer(self) -> Block:
        """What was asked for; raises as :meth:`_answer` does."""
        return Block(*self._answer())

    def kernels(self) -> Sequence[Kernel]:
        """Those of a step; raises as :meth:`_answer` does."""
        self.ask(_KERNELS)
        return [Kernel(*kernel) for kernel in self._answer()]

    def _answer(self) -> Sequence[Any]:
        """What the process sends.

        Raises:
            RuntimeError: with what the contender said, when it failed.
            TimeoutError: when it does not answer.
        """
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"no answer in {LIMIT_S:.0f} s")
        found = self._pipe.recv()
        if isinstance(found, str):
            raise RuntimeError(found)
        answered: Sequence[Any] = found
        return answered

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Callable[[], None]], arguments: tuple[Any, ...], waits: bool) -> None:
    os.environ["QSYNC_WAIT_FOR_KERNELS"] = str(int(waits))  # whatever the process says that starts contenders
    cuda = torch.cuda.is_available()
    try:
        step = make(*arguments)
        while True:
            steps = pipe.recv()
            if steps == _KERNELS:
                device = torch.device("cuda" if cuda else "cpu")
                pipe.send([tuple(kernel) for kernel in kernels_of(recorded(step, device), device)])
                continue
            pipe.send((*_block(step, steps, cuda), _compiled_beside() if not steps else False))
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    except EOFError:
        return
    except Exception:
        pipe.send(traceback.format_exc(limit=-4))


def _block(step: Callable[[], None], steps: int, cuda: bool) -> tuple[float, float]:
    """Milliseconds of a step, of ``steps`` behind one that fills the queue as every later one does, and the peak."""
    step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / max(steps, 1), torch.cuda.max_memory_allocated() / GIB
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) * 1e3 / max(steps, 1), 0.0


def _compiled_beside() -> bool:
    """Wait for the compilers that work beside this process, if there are any."""
    threads = [thread for thread in threading.enumerate() if thread.name == COMPILES]
    for thread in threads:
        thread.join()
    return bool(threads)
