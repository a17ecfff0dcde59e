"""Checkpoints that a killed job resumes from: whole or not there, and the same random numbers again.

Files are PyTorch's own (``torch.save``), and read with ``weights_only=True``: nothing in them is executed.
"""

from __future__ import annotations

import base64
import io
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.errors import ArtifactError, PlanError, RankError
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.distributed.exchange import by_value
from qsync_torch.distributed.process_group import own_rank
from qsync_torch.distributed.ranks import naming_lost_ranks, together, told_by_all

_PREFIX, _SUFFIX = "step-", ".pt"
_KEYS = {"step", "state", "plan", "random"}
_FACTORS = "factors"
"""Channel factors of a plan's operators, of each rank by its place."""
_BATCHES = "batches"
"""Samples of a step, of the job and as planned; not in the files of versions that did not keep them."""


class Resumable(Protocol):
    """A plan in force, as far as checkpoints ask it."""

    @property
    def place(self) -> str:
        """Which part this process has in its job, whatever its rank is."""

    @property
    def global_batch(self) -> int | None:
        """Samples of a step on all ranks; None where that is not known."""

    @property
    def planned_batch(self) -> int | None:
        """Samples of a step as planned; None where that is not known."""

    @property
    def resize(self) -> str | None:
        """What the script has said is to stay where the job has other ranks than planned."""

    def state_dict(self) -> dict[str, Any]:
        """What is equal on all ranks, and perhaps ``factors``, texts of this rank's own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a stored state."""

    def share_buffers(self) -> None:
        """Give all ranks the same buffers."""


@attrs.frozen
class Checkpoint:
    """What a job resumes from.

    Attributes:
        step: that :meth:`Checkpoints.save` was given.
        state: likewise, with its tensors on the CPU unless :meth:`Checkpoints.load` was told otherwise.
    """

    step: int
    state: dict[str, Any]


class Checkpoints:
    """A folder of checkpoints, of which the newest whole ones are kept.

    Every machine writes its own copy (its local rank 0 does), so that the folder may be on a shared disk or on a disk of each
    machine: where a machine comes back without the newest one, another sends it.  Use it on all ranks::

        checkpoints = Checkpoints("checkpoints", applied)
        if (found := checkpoints.load()) is not None:
            model.load_state_dict(found.state["model"])
        ...
        checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    Args:
        folder: made where it is not there.
        applied: what ``apply_`` returned: what is saved has the buffers of a training rank, and random numbers go on as in an
            unbroken run.  None for a job without a plan.
        keep: how many, the newest.
    """

    def __init__(self, folder: str | os.PathLike[str], applied: Resumable | None = None, *, keep: int = 2) -> None:
        if keep < 1:
            raise PlanError(f"a job resumes from at least one checkpoint, got keep={keep}")
        self.folder, self._applied, self._keep = Path(folder), applied, keep
        self._has_read_back = False

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints in this machine's folder, newest first."""
        names = (path.name[len(_PREFIX) : -len(_SUFFIX)] for path in self.folder.glob(f"{_PREFIX}*{_SUFFIX}"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"{_PREFIX}{step:010d}{_SUFFIX}"

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; call it on every rank, between two steps.  When it returns, every machine has it whole.

        Args:
            step: number of steps that are done.
            state: tensors, numbers, texts, and lists and dictionaries of them, as ``state_dict()`` of models and optimizers gives
                them, equal on all ranks; with whatever says where the data go on.

        Raises:
            ArtifactError: on every rank, when one cannot write it, or it holds what cannot be read without running code; older ones
                stay.
            RankError: when ranks are at different steps, or one has ended.
        """
        if self._applied is not None:
            self._applied.share_buffers()
        plan = {} if self._applied is None else self._applied.state_dict()
        mine = {"step": str(step), "place": self._place(), "random": _random_state(), _FACTORS: json.dumps(plan.pop(_FACTORS, {}))}
        told = told_by_all("Checkpoints.save", mine)
        if factors := {said["place"]: found for said in told.values() if (found := json.loads(said[_FACTORS]))}:
            plan[_FACTORS] = factors
        if len({said["step"] for said in told.values()}) > 1:
            steps = by_value({rank: said["step"] for rank, said in told.items()})
            raise RankError(f"the ranks of this job save different steps ({steps}); save on all of them after the same step")
        contents = {
            "step": step,
            "state": dict(state),
            "plan": plan,
            "random": {said["place"]: said["random"] for said in told.values()},
            _BATCHES: self._batches(),
        }
        with together("Checkpoints.save, writing", slow=True):
            if _writes():
                written = io.BytesIO()
                torch.save(contents, written)
                if not self._has_read_back:  # once: what cannot be read is to be known now, and not when it is needed
                    self._read(io.BytesIO(written.getbuffer()), self.path(step), "cpu")
                    self._has_read_back = True
                self._put(step, written.getbuffer())
                for old in self.steps()[self._keep :]:
                    self.path(old).unlink(missing_ok=True)

    def load(self, map_location: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest checkpoint that any machine of the job has; call it on every rank, before the first step.

        Random numbers of PyTorch, and those of the plan in force, go on as they were when it was saved; PyTorch's on a rank which
        that job did not have are seeded from the step.

        Returns:
            None where there is none.

        Raises:
            ArtifactError: on every rank, when the file of one cannot be read.
            PlanError: as ``applied.load_state_dict``; on every rank, when the job that saved it had another global batch, and no
                script has said what is to stay (docs/coming-and-going.md).
            RankError: when a rank has ended.
        """
        told = told_by_all("Checkpoints.load", {"steps": " ".join(map(str, self.steps()))})
        has = {rank: [int(step) for step in said["steps"].split()] for rank, said in told.items()}
        newest = max((step for steps in has.values() for step in steps), default=None)
        if newest is None:
            return None
        holders = [rank for rank, steps in has.items() if newest in steps]
        data = None if len(holders) == len(has) else self._receive(newest, holders[0])
        with together("Checkpoints.load, reading", slow=True):
            path = self.path(newest)
            found = self._read(path if data is None else io.BytesIO(data), path, map_location)
            self._check_batches(path, found.get(_BATCHES, []))
            if self._applied is not None and found["plan"]:
                plan = dict(found["plan"])
                factors = plan.pop(_FACTORS, {}).get(self._place())
                self._applied.load_state_dict(plan if factors is None else {**plan, _FACTORS: factors})
            self._restore_random(newest, found["random"])
        return Checkpoint(newest, found["state"])

    def _receive(self, step: int, holder: int) -> bytes:
        """A checkpoint that one rank has and others do not; each machine keeps it."""
        mine = dist.get_rank() == holder
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        data = bytearray(self.path(step).read_bytes()) if mine else bytearray()
        with naming_lost_ranks("Checkpoints.load"):
            size = torch.tensor([len(data)], device=device)
            dist.broadcast(size, holder)
            sent = torch.empty(int(size), dtype=torch.uint8, device=device)
            if mine:
                sent.copy_(torch.frombuffer(data, dtype=torch.uint8))
            dist.broadcast(sent, holder)
        received = sent.cpu().numpy().tobytes()
        with together(f"Checkpoints.load, keeping what rank {holder} sent", slow=True):
            if _writes() and step not in self.steps():
                self._put(step, received)
        return received

    def _put(self, step: int, data: bytes | memoryview) -> None:
        """Write a file whole or not at all, also where the machine fails; what killed processes left of other steps goes."""
        path = self.path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            for left in self.folder.glob(f".{_PREFIX}*.tmp"):
                if not left.name.startswith(f".{path.name}."):
                    left.unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(f"cannot write the checkpoint {path}: {error.strerror}; those before it are whole") from None

    def _read(self, source: Path | io.BytesIO, path: Path, map_location: str | torch.device) -> dict[str, Any]:
        try:
            found = torch.load(source, map_location=map_location, weights_only=True)
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise ArtifactError(
                f"the checkpoint {path} cannot be read ({first}): it may have tensors, numbers, texts, lists and dictionaries, and "
                "no other objects; where a file is damaged, remove it to go on from the one before"
            ) from None
        if not isinstance(found, dict) or set(found) - {_BATCHES} != _KEYS:
            raise ArtifactError(f"{path} was not written by Checkpoints.save: read it with torch.load, or give another folder")
        return found

    def _batches(self) -> list[int | None]:
        return [] if self._applied is None else [self._applied.global_batch, self._applied.planned_batch]

    def _check_batches(self, path: Path, saved: list[int | None]) -> None:
        """Refuse another global batch where it is the planned one before and now, and this script does not say what is to stay."""
        now = self._batches()
        if None in (*saved, *now) or any(was == is_now for was, is_now in zip(saved, now, strict=False)) or not (saved and now):
            return
        differ = f"the checkpoint {path} is of a job with {saved[0]} samples a step, and this one has {now[0]}"
        assert self._applied is not None
        if self._applied.resize is None:
            raise PlanError(
                f"{differ}: go on with the groups that saved it, or say in this script what is to stay, with resize='keep-global' "
                f"or 'keep-local', and a learning rate for {now[0]} samples (docs/coming-and-going.md)"
            )
        if own_rank() == 0:
            warnings.warn(f"{differ}: the learning rate is to be for {now[0]} samples", stacklevel=3)

    def _place(self) -> str:
        if self._applied is not None:
            return self._applied.place
        return f"rank/{own_rank()}"

    def _restore_random(self, step: int, by_place: Mapping[str, str]) -> None:
        if (kept := by_place.get(self._place())) is None:
            torch.manual_seed(stream_key(step, *self._place().encode()))
            return
        cpu, _, cuda = kept.partition(" ")
        torch.set_rng_state(_bytes(cpu))
        if cuda and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(cuda))


def _random_state() -> str:
    """PyTorch's generators of this process, as text: the CPU's, and where CUDA runs that of the current device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return " ".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _writes() -> bool:
    """Whether this process writes: one of each machine does."""
    with suppress(ValueError):
        return int(os.environ.get("LOCAL_RANK", "0")) == 0
    return True
