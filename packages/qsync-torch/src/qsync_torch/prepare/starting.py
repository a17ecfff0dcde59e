"""How training is started without the groups that the verdict leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.launching.machines import GroupMachines, PlannedJob
from qsync_core.launching.torchrun import Meeting, machine_commands
from qsync_core.run_folder import RunFolder
from qsync_torch.prepare.participants import Group, Participant

_HERE = "127.0.0.1"


@attrs.frozen
class Fewer:
    """A job of fewer groups than are here, which does more than that of all.

    Attributes:
        groups: that train; left_out: the others.
        commands: a shell's lines, by host.
        samples: of its step; of_all: of a step of all groups.
    """

    groups: tuple[str, ...]
    left_out: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]
    samples: int
    of_all: int

    def sentences(self, call: str) -> list[str]:
        """What to type, and what it means for training; ``call`` is the script's, such as ``qsync.hybrid``."""
        several = len({host for host, _ in self.commands}) > 1
        lines = [f"{host}: {line}" if several else line for host, line in self.commands]
        return [
            f"{' and '.join(self.left_out)} {'is' if len(self.left_out) == 1 else 'are'} better left out; train without, by:",
            *(f"  {line}" for line in lines),
            f"a step then has {self.samples} samples, each rank its own batch, and not the {self.of_all} of all groups; where the "
            f"learning rate is for {self.of_all}, keep them with {call}(..., resize='keep-global') and the loop over "
            "applied.micro_batches(ddp) (docs/coming-and-going.md)",
        ]


def fewer_groups(run: RunFolder, plan: PrecisionPlan, here: Sequence[Group], script: Sequence[str]) -> Fewer | None:
    """What to start where the plan of all groups recommends fewer of them; None where it does not.

    Args:
        run: the run folder.
        plan: for all groups of its cluster.
        here: the groups that are here, with the machines of their ranks.
        script: what torchrun starts, with arguments.
    """
    kept = plan.recommended_groups
    if len(kept) in (0, len(plan.groups)) or not run.plan(kept).is_file() or set(kept) - {group.name for group in here}:
        return None
    alone = run.load_plan(kept)
    return Fewer(
        groups=kept,
        left_out=tuple(entry.group for entry in plan.groups if entry.group not in kept),
        commands=tuple(_commands(alone, here, script)),
        samples=_samples(alone),
        of_all=_samples(plan),
    )


def _samples(plan: PrecisionPlan) -> int:
    return sum(entry.count * plan.local_batches[entry.group] for entry in plan.groups)


def _commands(plan: PrecisionPlan, here: Sequence[Group], script: Sequence[str]) -> list[tuple[str, str]]:
    """Each machine's name and the line for it, of which one with several groups has several; a training group is first."""
    order = sorted(plan.groups, key=lambda entry: entry.role is not Role.TRAIN)
    members = {group.name: group.members for group in here}
    places = [(entry, host, count) for entry in order for host, count in Counter(m.host for m in members[entry.group]).items()]
    machines = tuple(GroupMachines(entry, node, 1, count) for node, (entry, _, count) in enumerate(places))
    hosts = [host for _, host, _ in places]
    meeting = Meeting(hosts[0] if len(set(hosts)) > 1 else _HERE)
    found = []
    for host, command in zip(hosts, machine_commands(PlannedJob(machines, len(machines)), meeting, script), strict=True):
        on_host = [member for group in here for member in group.members if member.host == host]
        own = [member for member in members[command.group] if member.host == host]
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(member.gpu for member in own)} if _chooses_gpus(own, on_host) else {}
        found.append((host, attrs.evolve(command, environment={**command.environment, **gpus}).line()))
    return found


def _chooses_gpus(own: Sequence[Participant], on_host: Sequence[Participant]) -> bool:
    """Whether a machine has other GPUs in this job than these, of which torchrun's processes would take the first ones."""
    return all(member.gpu for member in own) and {member.gpu for member in own} != {member.gpu for member in on_host}
