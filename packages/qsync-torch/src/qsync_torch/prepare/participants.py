"""Who takes part: what every process says of its device, and the groups that they form."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.cluster_file import GROUP_NAME, GROUP_NAME_RULE
from qsync_core.devices import find_chip, same_device
from qsync_core.errors import ClusterError, QSyncError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.units import format_bytes, parse_memory
from qsync_torch.devices import device_type
from qsync_torch.distributed.exchange import rank_list
from qsync_torch.distributed.ranks import GROUP_VARIABLE, SHARE_VARIABLE, same_share, which_group_of_cluster
from qsync_torch.prepare.folder import Folder, of_rank

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@attrs.frozen
class Participant:
    """What a process says of itself.

    Attributes:
        kernel: equal for processes that run on the same cores, also in containers.
        device: with the share that the job has of it.
        memory_bytes: of the device; 0 where that is no limit (a CPU).
        group: what ``QSYNC_GROUP`` says, if anything.
        software: versions and settings of the process.
        gpu: as ``CUDA_VISIBLE_DEVICES`` names it; empty for a CPU.
    """

    rank: int
    host: str
    kernel: str
    cores: tuple[int, ...]
    device: DeviceType
    memory_bytes: int
    group: str
    software: Mapping[str, str]
    gpu: str = ""

    @classmethod
    def here(cls, rank: int, device: torch.device, share: float, software: Mapping[str, str]) -> Participant:
        """This process."""
        host = socket.gethostname()
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        return cls(
            rank=rank,
            host=host,
            kernel=_BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else host,
            cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
            device=device_type(device, share),
            memory_bytes=memory,
            group=os.environ.get(GROUP_VARIABLE, ""),
            software={name: value for name, value in software.items() if value},
            gpu=_name_of_gpu(device.index or 0) if device.type == "cuda" else "",
        )

    def disturbs(self, other: Participant) -> bool:
        """Whether two that measure at the same time would slow each other down: they compute on the same cores."""
        if DeviceKind.CPU not in (self.device.kind, other.device.kind) or self.kernel != other.kernel:
            return False
        return not self.cores or not other.cores or not set(self.cores).isdisjoint(other.cores)


@attrs.frozen
class Wish:
    """What ``--group NAME=role:infer,share:0.5,memory:20 GiB`` says of a group."""

    role: Role | None = None
    share: float | None = None
    memory_bytes: int = 0

    @classmethod
    def parse(cls, text: str) -> tuple[str, Wish]:
        """A group's name and what is wished of it.

        Raises:
            QSyncError: naming the part that is wrong.
        """
        name, separator, rest = text.partition("=")
        if not (name and separator and rest):
            raise QSyncError(f"--group is written NAME=role:infer,share:0.5,memory:20GiB, each part as needed; got {text!r}")
        found: dict[str, object] = {}
        for part in rest.split(","):
            key, _, value = (piece.strip() for piece in part.partition(":"))
            try:
                if key in found:
                    raise ValueError(f"{key} is given twice")
                if key == "role":
                    found[key] = Role(value)
                elif key == "share":
                    found[key] = float(value)
                    if not 0 < float(value) <= 1:
                        raise ValueError("a share is above 0 and at most 1")
                elif key == "memory":
                    found[key] = parse_memory(value)
                    if not found[key]:
                        raise ValueError("a memory is above 0; leave it out for no limit")
                else:
                    raise ValueError("known are role, share and memory")
            except ValueError as error:
                raise QSyncError(f"--group {name}: {part.strip()!r} is not understood: {error}") from None
        return name, cls(found.get("role"), found.get("share"), found.get("memory", 0))  # type: ignore[arg-type]

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> dict[str, Wish]:
        """What is wished of each group, by name.

        Raises:
            QSyncError: naming the part that is wrong, or a group that two options speak of.
        """
        found: dict[str, Wish] = {}
        for name, wish in map(cls.parse, texts):
            if name in found:
                raise QSyncError(f"--group {name} is given twice: write all of it in one, as {name}=role:infer,memory:20GiB")
            found[name] = wish
        return found


@attrs.frozen
class Group:
    """Participants of one kind."""

    name: str
    members: tuple[Participant, ...]

    @property
    def first(self) -> Participant:
        """The one that measures for all."""
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group's members."""
        return tuple(member.rank for member in self.members)


def gather(folder: Folder, mine: Participant) -> list[Participant]:
    """All participants, by rank."""
    told = folder.told({"participant": json.dumps(to_plain(mine))})
    return [of_rank(rank, _participant, said["participant"]) for rank, said in sorted(told.items())]


def _participant(text: str) -> Participant:
    """Read what a process says of itself.

    Raises:
        QSyncError: when it is something else, or its group has a name that no group can have.
    """
    try:
        participant = from_plain(json.loads(text), Participant)
    except (ValueError, RecursionError) as error:
        raise QSyncError(f"its description cannot be read: {error}") from None
    if participant.group and not GROUP_NAME.fullmatch(participant.group):
        raise ClusterError(f"{GROUP_VARIABLE} is {participant.group[:80]!r} there, but {GROUP_NAME_RULE}")
    return participant


def form_groups(participants: Sequence[Participant], wished: Collection[str] = ()) -> list[Group]:
    """Groups where no cluster file describes them: those that ``QSYNC_GROUP`` names, the others by device type and share.

    Args:
        wished: names of groups that there must be.

    Raises:
        ClusterError: when a named group has devices of several types, or there is no group that is wished for.
    """
    found: dict[str, list[Participant]] = {}
    for participant in participants:
        found.setdefault(participant.group or _name_of(participant.device), []).append(participant)
    for name, members in found.items():
        devices = {(member.device.name, member.device.share) for member in members}
        if len(devices) > 1:
            which = " and ".join(f"{device} at {share:.0%}" for device, share in sorted(devices))
            raise ClusterError(
                f"group {name!r} has devices of different types ({which}, {rank_list([member.rank for member in members])}): give "
                f"each type a name of its own in {GROUP_VARIABLE}, or leave it unset"
            )
    if missing := [name for name in wished if name not in found]:
        raise ClusterError(f"--group names {missing[0]!r}, but the groups of this job are {', '.join(found)}")
    return [Group(name, tuple(members)) for name, members in found.items()]


def find_groups(participants: Iterable[Participant], described: Cluster) -> list[Group]:
    """The described groups that have participants here.

    Raises:
        ClusterError: when a participant is in none, or its device is not the group's.
    """
    found: dict[str, list[Participant]] = {}
    for participant in participants:
        device = participant.device
        environment = {GROUP_VARIABLE: participant.group}
        if device.kind is DeviceKind.CUDA and device.share < 1:
            environment[SHARE_VARIABLE] = f"{100 * device.share:g}"
        try:
            name = which_group_of_cluster(described, environment, lambda device=device: (device.name, device.kind))  # type: ignore[misc]
        except ClusterError as error:
            raise ClusterError(f"rank {participant.rank} on {participant.host}: {error}") from None
        group = described.group(name)
        if not same_device(group.device, device.name) or not same_share(group.share, device.share):
            raise ClusterError(
                f"rank {participant.rank} on {participant.host} has {device.name} at {device.share:.0%}, but its group {name!r} is "
                f"described with {group.device} at {group.share:.0%}; correct the group, or {GROUP_VARIABLE} there"
            )
        if group.memory_bytes > participant.memory_bytes > 0:
            raise ClusterError(
                f"group {name!r} is described with memory {format_bytes(group.memory_bytes)}, but rank {participant.rank} on "
                f"{participant.host} has {format_bytes(participant.memory_bytes)}; correct it"
            )
        found.setdefault(name, []).append(participant)
    return [Group(group.name, tuple(found[group.name])) for group in described.groups if group.name in found]


def waves(groups: Iterable[Group]) -> list[list[Group]]:
    """Groups that may measure at the same time, one wave after the other; one rank of each measures."""
    found: list[list[Group]] = []
    for group in groups:
        free = (wave for wave in found if not any(group.first.disturbs(other.first) for other in wave))
        wave = next(free, None)
        if wave is None:
            found.append([group])
        else:
            wave.append(group)
    return found


def crowded(participants: Iterable[Participant]) -> str:
    """A sentence on the first machine whose processes have more threads than it has cores for them; empty where none has.

    torchrun sets one thread where it starts several processes itself, and none of it where it is started once for each.
    """
    by_machine: dict[str, list[Participant]] = {}
    for one in participants:
        if one.device.kind is DeviceKind.CPU and one.cores:
            by_machine.setdefault(one.kernel, []).append(one)
    for everyone in by_machine.values():
        members = [one for one in everyone if any(one is not other and one.disturbs(other) for other in everyone)]
        cores = set().union(*(one.cores for one in members))
        threads = sum(int(one.software.get("threads", "1")) for one in members)
        if threads > len(cores):
            most = max(1, len(cores) // len(members))
            each = f"set OMP_NUM_THREADS={most} for each" if threads > most * len(members) else "start one for each core at most"
            return (
                f"the {len(members)} processes on {members[0].host} have {threads} threads for {len(cores)} cores: they wait for "
                f"each other, and what is measured of them may be far off; {each}, here and in training"
            )
    return ""


def _name_of_gpu(index: int) -> str:
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[index] if index < len(visible) else str(index)


def _name_of(device: DeviceType) -> str:
    """Such as ``t4``, or ``h200-50`` for half of one."""
    chip = find_chip(device.name)
    name = _NOT_IN_NAMES.sub("-", chip.name if chip else device.name).strip("-.").lower()[:48] or "device"
    return name if device.share == 1 else f"{name}-{100 * device.share:g}"
