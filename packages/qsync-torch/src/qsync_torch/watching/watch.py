"""A watch of a job's ranks: each tells the others how long its phases take, now and then, and rank 0 says who is slow.

Ranks tell it through the process group's store: nothing pairs with a collective, nothing waits, and no GPU is synchronised.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs
import torch.distributed as dist
from torch import nn

from qsync_core.printable import tell
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.process_group import own_rank
from qsync_torch.watching.compare import Slowest, Told, as_message, slowest
from qsync_torch.watching.phases import Phase, PhaseTimer, StepPhases, wrapper_in

WARM_UP = 5
"""Steps that are not looked at: buckets are formed, memory is found, kernels are chosen."""
WINDOW = 12
"""Steps that are summed up together.  A rank is named where two windows behind each other say the same, so that a moment in which
something else keeps its cores busy names nobody; one that becomes slow at any step is named within three windows and some."""
_LATE = 3
"""Forwards from the end of a window until rank 0 looks what others have told; those of a later rank are not waited for."""
_WATCHES = itertools.count()

WriteScalar = Callable[[str, float, int], object]
"""Takes a name, a value and the step: TensorBoard's ``SummaryWriter.add_scalar``, ``mlflow.log_metric``."""


class RankWatch:
    """Watches the steps of a job, from its making on, on every rank (docs/slow-ranks.md).

    Args:
        models: what the loop calls: wrappers in DistributedDataParallel, or what ``torch.compile`` makes of them.
        group: this rank's device group under a plan.
        weight: what the plan expects this rank's compute to take; 1 where ranks are to be alike.
        say: is given a sentence on rank 0, once for a rank and a phase; by default a line on standard error says it.

    Attributes:
        judges: whether this is the rank that compares all of them: the first.

    Raises:
        JobError: where a model is in no DistributedDataParallel.
    """

    def __init__(
        self, *models: nn.Module, group: str = "", weight: float = 1.0, say: Callable[[str], object] | None = None
    ) -> None:
        self._group, self._weight, self._say = group, weight, say or tell
        self._steps: list[StepPhases] = []
        self._skip, self._window, self._to_judge = WARM_UP, 0, -1
        self._told: Told | None = None
        self._all_told: dict[int, Told] = {}
        self._suspected: Slowest | None = None
        self._found: Slowest | None = None
        self._said: set[tuple[int, Phase]] = set()
        self._writers: list[WriteScalar] = []
        self._machine = _machine()
        members = Mailbox.of_group(wrapper_in(models[0]).process_group) if dist.is_initialized() else None
        self._members = None if members is None else members.part(f"qsync/watch/{next(_WATCHES)}")
        self.judges = self._members is None or self._members.rank == min(self._members.ranks)
        self._times = PhaseTimer(models, self._take, self._exchange)

    def slowest(self) -> Slowest | None:
        """The rank that the others wait for in the last steps that were summed up; None where there is none, or not yet."""
        if self._members is not None and not self.judges:
            with suppress(dist.DistError):
                if self._members.posted(_FOUND):
                    said = self._members.read(_FOUND)
                    return None if said is None else _read(said)
        return self._found

    def phases(self) -> dict[int, Told]:
        """What ranks have told of the last steps that were summed up: on rank 0 all of them, elsewhere this one; empty before."""
        if self._all_told:
            return dict(self._all_told)
        return {} if self._told is None else {own_rank(): self._told}

    def log_scalars(self, write: WriteScalar) -> None:
        """Write this rank's phases from now on, in milliseconds, a point for every 12 steps: ``qsync/input_ms`` and so on.

        On rank 0 also ``qsync/slowest_rank``, -1 where none is slow, and ``qsync/slowest_delay_ms``.

        Args:
            write: takes name, value and step: TensorBoard's ``writer.add_scalar``, or ``mlflow.log_metric``; for W&B
                ``lambda name, value, step: run.log({name: value, "step": step})``.
        """
        self._writers.append(write)

    def computes(self) -> None:
        """Called in a forward once buffers are there, where it is not DistributedDataParallel that broadcasts them."""
        self._times.computes()

    def close(self) -> None:
        """Watch no more."""
        self._times.close()

    def _take(self, step: StepPhases) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._steps.append(step)

    def _exchange(self) -> None:
        """Called where a forward begins; most often there is nothing to do."""
        if self._to_judge > 0:
            self._to_judge -= 1
            if self._to_judge == 0:
                self._judge()
        if len(self._steps) < WINDOW:
            return
        steps, self._steps = self._steps[:WINDOW], self._steps[WINDOW:]
        self._told = told = Told.of(self._window, steps, self._machine, self._group, self._weight)
        self._window += 1
        if self._members is not None:
            with suppress(dist.DistError):
                self._members.say(_TOLD, as_message(told))
        self._to_judge = _LATE
        self._write({f"qsync/{phase}_ms": ns / 1e6 for phase, ns in told.phases_ns.items()})

    def _judge(self) -> None:
        if not self.judges or self._told is None:
            return
        told = {own_rank(): self._told}
        if self._members is not None:
            with suppress(dist.DistError):
                heard = {rank: Told(**said) for rank, said in self._members.heard(_TOLD).items()}
                told |= {rank: one for rank, one in heard.items() if one.window == self._told.window}
        self._all_told = told
        before, self._suspected = self._suspected, slowest(told)
        found = self._suspected if before is not None and before.names_the_same(self._suspected) else None
        self._found = found
        if self._members is not None:
            with suppress(dist.DistError):
                self._members.post(_FOUND, None if found is None else attrs.asdict(found))
        self._write(
            {
                "qsync/slowest_rank": -1.0 if found is None else float(found.rank),
                "qsync/slowest_delay_ms": 0.0 if found is None else found.delay_ns / 1e6,
            }
        )
        if found is not None and (found.rank, found.phase) not in self._said:
            self._said.add((found.rank, found.phase))
            self._say(found.sentence)

    def _write(self, values: dict[str, float]) -> None:
        for write, (name, value) in itertools.product(self._writers, values.items()):
            write(name, value, WARM_UP + self._window * WINDOW)


_TOLD, _FOUND = "told", "found"


def _read(said: dict[str, object]) -> Slowest:
    more = said.pop("more")
    assert isinstance(more, dict)
    phase = Phase(str(said.pop("phase")))
    return Slowest(**said, phase=phase, more={Phase(name): ns for name, ns in more.items()})  # type: ignore[arg-type]


def _machine() -> str:
    """Name what processes with one monotonic clock share: the kernel's boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
