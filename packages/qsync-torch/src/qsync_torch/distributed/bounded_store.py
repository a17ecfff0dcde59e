"""Calls of the store that ranks meet in, each of which ends.

PyTorch's own wait without end where the process that holds the store is stopped, or another program has its port: its time-outs are
those of keys that are not there.  A call is made in another thread, which is left behind where nothing comes of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import attrs
import torch.distributed as dist

from qsync_core.errors import PlanError

T = TypeVar("T")

TIMEOUT_VARIABLE = "QSYNC_RANK_TIMEOUT_S"
_COLLECTIVES = 10
"""How many times as long as a rank's silence a collective may take: its data may be large, and its network slow."""
_AGAIN = 0.1
"""Which share of the time a call gets after one that was not answered."""


def rank_timeout_s() -> float:
    """What ``QSYNC_RANK_TIMEOUT_S`` says, else 30 seconds.

    Raises:
        PlanError: when that is no number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "") or "30"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PlanError(f"{TIMEOUT_VARIABLE} is {text!r}; set it to a number of seconds above 0")
    return seconds


def collective_timeout() -> timedelta:
    """Time-out of a process group that QSync makes, for ranks that all live and yet wait for each other."""
    return timedelta(seconds=_COLLECTIVES * rank_timeout_s())


class StoreSilent(dist.DistStoreError):
    """The store has not answered in time."""


class _Caller:
    """A thread that makes calls for others, one after the other."""

    idle: ClassVar[list[_Caller]] = []

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="qsync-store", daemon=True).start()

    def make(self, call: Callable[[], T], limit_s: float) -> T:
        done: Future[T] = Future()
        self._calls.put((call, done))
        try:
            return done.result(limit_s)
        finally:
            if done.done():
                self.idle.append(self)

    def _run(self) -> None:
        while True:
            call, done = self._calls.get()
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            del call, done  # which may hold a store


os.register_at_fork(after_in_child=_Caller.idle.clear)  # whose threads the child does not have


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What a call gives.

    Raises:
        TimeoutError: when it has not ended in time; it goes on in a thread of its own, which nothing waits for.
    """
    try:
        caller = _Caller.idle.pop()
    except IndexError:
        caller = _Caller()
    return caller.make(call, limit_s)


@attrs.frozen(eq=False)
class BoundedStore:
    """A store whose calls raise :class:`StoreSilent` where it does not answer for ``QSYNC_RANK_TIMEOUT_S`` seconds.

    After that a call gets a tenth of it until one is answered, so that a rank which ends does not wait once more for each key.
    """

    store: dist.Store

    def under(self, prefix: str) -> BoundedStore:
        """The keys that begin with a prefix."""
        return BoundedStore(dist.PrefixStore(prefix, self.store))

    def own_connection(self) -> BoundedStore:
        """The same keys over another connection, which is free while PyTorch waits for a key over this one."""
        return BoundedStore(self._answer(self.store.clone))  # type: ignore[attr-defined]  # which torch's stubs leave out

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._answer(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # torch's stubs leave out bytes

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return self._answer(lambda: self.store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are there."""
        return self._answer(lambda: self.store.multi_get(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; what it is then."""
        return self._answer(lambda: self.store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._answer(lambda: self.store.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        """Whether there was such a key, which is gone now."""
        return self._answer(lambda: self.store.delete_key(key))

    @staticmethod
    def _answer(call: Callable[[], T]) -> T:
        limit_s = rank_timeout_s() * (1.0 if _ANSWERS.is_set() else _AGAIN)
        try:
            found = within(limit_s, call)
        except TimeoutError:
            _ANSWERS.clear()
            raise StoreSilent(f"no answer for {rank_timeout_s():g} s") from None
        _ANSWERS.set()
        return found


def bounded(store: dist.Store | BoundedStore) -> BoundedStore:
    """The same store, bounded."""
    return store if isinstance(store, BoundedStore) else BoundedStore(store)


_ANSWERS = threading.Event()
_ANSWERS.set()
