"""How the two workers meet outside collectives: over torchrun's store, so that nobody spins or waits inside a measurement."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class Rendezvous:
    """The workers' store: exchange small values, and ask without waiting whether the other has finished."""

    def __init__(self) -> None:
        store, self.rank, self.world_size = next(iter(dist.rendezvous("env://")))
        self._store = dist.PrefixStore("qsync-demo", store)
        self._calls = 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; all ranks must call it equally often."""
        self._calls += 1
        self._store.set(f"gather/{self._calls}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"gather/{self._calls}/{rank}")) for rank in range(self.world_size)]

    def announce(self, what: str) -> None:
        """Tell the others that this rank has finished something."""
        self._store.set(f"{what}/{self.rank}", "1")

    def all_announced(self, what: str) -> bool:
        """Whether every rank has."""
        return bool(self._store.check([f"{what}/{rank}" for rank in range(self.world_size)]))

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """A gloo process group of all workers."""
        self._calls += 1
        store = dist.PrefixStore(f"group/{self._calls}", self._store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        try:
            yield
        finally:
            # A DistributedDataParallel that outlives its process group can abort the process at its end.
            gc.collect()
            dist.destroy_process_group()
