"""Copied, saved and loaded models; models in other processes and threads."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from qsync_core.errors import QSyncError
from qsync_torch import apply_
from robustness.reference import Reference
from robustness.wrong.two import BOTH, Pair, Two, batch, plain, plan, same, script, step


def copied(how: Callable[[Any], Any]) -> Pair:
    """A copy is a plain model, takes a plan of its own, and the original keeps its."""
    model = Two()
    apply_(model, plan())
    other = how(model)
    as_copied = step(other)
    apply_(other, plan())
    under, _ = same()
    return [as_copied, step(other), step(model)], [plain(step), under, same()[1]]


def saved(model: Any) -> Any:
    """Through ``torch.save`` of the whole model."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@script()
def pickled() -> Pair:
    return copied(lambda model: pickle.loads(pickle.dumps(model)))


@script()
def deepcopied() -> Pair:
    return copied(copy.deepcopy)


@script()
def shallow_copied() -> Pair:
    model = Two()
    apply_(model, plan())
    other = copy.copy(model)
    return step(other), same()[1]


@script()
def saved_and_loaded() -> Pair:
    return copied(saved)


@script()
def state_dict_round_trip() -> Pair:
    model, other = Two(), Two()
    apply_(model, plan())
    with torch.no_grad():
        model.a.weight.mul_(2)
    other.load_state_dict(model.state_dict())

    def doubled() -> Any:
        twin = Two()
        with torch.no_grad():
            twin.a.weight.mul_(2)
        return twin

    return [step(other), step(model)], [plain(step, doubled), same(make=doubled)[1]]


def _in_process(model: Any, queue: Any) -> None:
    queue.put([None if t is None else t.numpy() for t in step(model)])


@script()
def spawned() -> Pair:
    model = Two()
    apply_(model, plan())
    process = multiprocessing.get_context("spawn").Process(target=_in_process, args=(model, None))
    process.start()
    return 0, "a refusal"


@script()
def forked() -> Pair:
    model = Two()
    apply_(model, plan())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(write, "wb") as stream:
                stream.write(pickle.dumps([t.tolist() for t in step(model)]))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        found = pickle.loads(stream.read())
    os.waitpid(child, 0)
    return [torch.tensor(t) for t in found], same()[1]


@script(RuntimeError)
def two_threads() -> Pair:
    model = Two(lambda model, x: (barrier.wait(5), model.body(x))[1])
    barrier = threading.Barrier(2)
    apply_(model, plan())
    found: list[Any] = [None, None]

    def run(i: int) -> None:
        try:
            found[i] = model(batch(i)).detach()
        except BaseException as error:
            found[i] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [e for e in found if isinstance(e, QSyncError)]
    if errors:
        raise errors[0]
    twin = Two()
    with Reference(twin, BOTH).running():
        return found, [twin(batch(i)).float().detach() for i in range(2)]


@script()
def threads_in_turn() -> Pair:
    def run(model: Any) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(step(model)))
        thread.start()
        thread.join()
        return found

    model = Two()
    apply_(model, plan())
    return run(model), same()[1]
