"""Where the processes of a job meet: the store that torchrun, or another launcher, names in the environment."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

import attrs
import torch.distributed as dist

from qsync_core.errors import RankError
from qsync_torch.distributed.bounded_store import TIMEOUT_VARIABLE, BoundedStore, rank_timeout_s, within


@attrs.frozen
class Place:
    """This process's place in a job, as torchrun (or another launcher) says in the environment.

    Attributes:
        rank: of this process, of so many in the ``world``.
        agent_store: torchrun keeps it, and not rank 0.
    """

    rank: int
    world: int
    host: str
    port: int
    agent_store: bool

    @classmethod
    def from_environment(cls) -> Place | None:
        """None outside a job of several processes.

        Raises:
            RankError: where the environment says only half of it.
        """
        try:
            world = int(os.environ.get("WORLD_SIZE", "1"))
            if world < 2 or "RANK" not in os.environ:
                return None
            return cls(
                int(os.environ["RANK"]),
                world,
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
            )
        except (KeyError, ValueError) as error:
            raise RankError(
                f"this process is one of {os.environ.get('WORLD_SIZE')}, but its place among them is not known ({error}): start it "
                "under torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            ) from None

    def store(self, *, holds: bool) -> dist.TCPStore:
        """A connection of its own to the job's store, within ``QSYNC_RANK_TIMEOUT_S`` seconds.

        Args:
            holds: on rank 0, where torchrun keeps no store, this process keeps it: the same one, however often it asks.

        Raises:
            RankError: when it cannot be reached.
        """
        limit_s = rank_timeout_s()
        try:
            return within(
                limit_s,
                lambda: dist.TCPStore(
                    self.host,
                    self.port,
                    self.world,
                    is_master=holds and self.rank == 0 and not self.agent_store,
                    timeout=timedelta(seconds=limit_s),
                    wait_for_workers=False,  # who is missing is found in the first round of reports, by its rank
                    multi_tenant=True,
                ),
            )
        except (dist.DistError, TimeoutError) as error:
            raise RankError(self._not_met(error, limit_s)) from None

    def _not_met(self, error: Exception, limit_s: float) -> str:
        """Why this process does not reach the store, as a sentence of its own."""
        where = f"{self.host}:{self.port}"
        said = str(error).partition("\n")[0]
        if "EADDRINUSE" in said:
            return (
                f"the ranks of this job cannot meet at {where}: another process has that port; end it, or give torchrun another "
                "one (--master-port), the same on all machines"
            )
        holder = "the torchrun of node rank 0" if self.agent_store else "rank 0"
        why = said or "what listens there says nothing, as another program would, or a process that is stopped"
        return (
            f"the ranks of this job did not meet at {where}: rank {self.rank} waited {limit_s:g} s for {holder}, which keeps the "
            f"store there ({why}): see that every machine was started with the same address and port, and reaches it; where "
            f"{holder} takes longer to come, set {TIMEOUT_VARIABLE} to more seconds"
        )


def store_of_environment() -> tuple[Place, BoundedStore] | None:
    """This process's place, and the job's store; None outside a job of several processes.

    The store is kept until the process ends, and with it, where rank 0 serves it and not torchrun, the port: ``init_process_group``
    finds it there.

    Raises:
        RankError: when the store cannot be reached: its port is in use, or rank 0 does not come.
    """
    place = Place.from_environment()
    return None if place is None else (place, _store_at(place))


@functools.lru_cache(maxsize=1)
def _store_at(place: Place) -> BoundedStore:
    store = place.store(holds=True)
    store.set_timeout(dist.constants.default_pg_timeout)  # a process group waits so long for keys
    return BoundedStore(store)
