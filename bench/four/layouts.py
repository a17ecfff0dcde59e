"""How many ranks each group of a job has, which share of a GPU each has, and on which GPUs they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from jobs.places import Machine, Place, gpu_machine

_GROUP = re.compile(r"([1-9]\d?)(?:@([1-9]\d?))?")


class UnsuitedLayout(ValueError):
    """A layout that is not understood, or for which there are not the GPUs."""


@attrs.frozen
class Layout:
    """Groups a, b and c by their numbers of ranks and their shares; written ``2+2@50``, in percent where a share is not whole."""

    counts: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout.

        Raises:
            UnsuitedLayout: when it is something else.
        """
        groups = [_GROUP.fullmatch(part) for part in text.split("+")]
        if not 2 <= len(groups) <= 3 or None in groups:
            raise UnsuitedLayout(f"a layout is two or three groups, such as 2+2@50 or 2+1@50+1@25 (ranks, percent), got {text!r}")
        found = [group for group in groups if group is not None]
        return cls(tuple(int(group[1]) for group in found), tuple(int(group[2] or 100) / 100 for group in found))

    def __str__(self) -> str:
        parts = zip(self.counts, self.shares, strict=True)
        return "+".join(f"{count}" if share == 1 else f"{count}@{round(100 * share)}" for count, share in parts)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(self.counts)

    @property
    def by_group(self) -> dict[str, tuple[int, float]]:
        """Number of ranks and share, by the group's name."""
        return dict(zip("abc", zip(self.counts, self.shares, strict=True), strict=False))

    def times(self, factor: int) -> Layout:
        """The same with more ranks in each group."""
        return attrs.evolve(self, counts=tuple(factor * count for count in self.counts))


FOUR = ("2+2@50", "3+1@50", "2+2@75")
THREE_GROUPS = ("2+1@50+1@25",)
EIGHT = ("4+4@50",)
SHARED = {1: ("2@25+2@10",), 2: ("2@75+2@25",), 3: ("2@75+2@25",)}
"""Of fewer GPUs, by their number: ranks side by side on a GPU, with shares that add up to no more than all of it."""


def on_gpus(layout: Layout, gpus: Sequence[str], mps: Mapping[str, str]) -> Place:
    """A GPU for each rank; where there are fewer, ranks share them, over gloo, because NCCL takes one rank a GPU.

    Raises:
        UnsuitedLayout: when the shares of the ranks on a GPU add up to more than all of it.
    """
    if set(layout.shares) == {1.0}:
        mps = {}  # nobody has a share, and a client that is killed takes others of its server along
    places = [(group, share) for group, (count, share) in layout.by_group.items() for _ in range(count)]
    if len(gpus) >= len(places):
        free, machines = iter(gpus), []
        for group, (count, share) in layout.by_group.items():
            machines.append(gpu_machine(group, [next(free) for _ in range(count)], share, mps))
        return Place(tuple(machines), True)
    machines, used = [], dict.fromkeys(gpus, 0.0)
    for number, (group, share) in enumerate(places):
        gpu = gpus[number % len(gpus)]
        used[gpu] += share
        machine = gpu_machine(group, [gpu], share, mps)
        machines.append(attrs.evolve(machine, environment={**machine.environment, "BACKEND": "gloo"}))
    if full := next((gpu for gpu, share in used.items() if share > 1 + 1e-9), None):
        raise UnsuitedLayout(
            f"{layout} has {layout.ranks} ranks and there are {len(gpus)} GPUs: side by side the shares on GPU {full} add up to "
            f"{used[full]:.0%}; smaller shares fit ({', '.join(SHARED.get(len(gpus), SHARED[1]))})"
        )
    return Place(tuple(machines), True)


def is_shared(place: Place) -> bool:
    """Whether ranks are side by side on GPUs: a check of what jobs do, not of how fast they are."""
    return any("BACKEND" in machine.environment for machine in place.machines)


def machines_by_rank(place: Place) -> list[Machine]:
    """A machine for each rank, where a rank may go and come back by itself."""
    found = []
    for machine in place.machines:
        gpus = machine.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for number in range(machine.ranks):
            own = {"CUDA_VISIBLE_DEVICES": gpus[number] if machine.ranks > 1 and number < len(gpus) else ",".join(gpus)}
            found.append(attrs.evolve(machine, ranks=1, environment={**machine.environment, **own}))
    return found
