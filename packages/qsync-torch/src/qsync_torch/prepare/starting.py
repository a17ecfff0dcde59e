"""How training is started with the groups that the verdict recommends."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from qsync_core.ir.plan import WORTH_IT, PrecisionPlan, RecommendedWay, Role
from qsync_core.ir.variant import Variant
from qsync_core.launching.machines import GroupMachines, PlannedJob
from qsync_core.launching.torchrun import Meeting, machine_commands, training
from qsync_core.run_folder import RunFolder
from qsync_torch.caller import Caller
from qsync_torch.prepare.participants import Group, Participant

FUNCTIONS_JOB, _FUSING = Caller("qsync.apply_"), Caller("qsync.compile")
"""What a script is to call whose job a function makes; the second where the plan runs chains as fused kernels."""
_HERE = "127.0.0.1"
_UNNAMED = "none"
"""The name of a torchrun's rendezvous that is given none, as one at ``--master-addr`` and ``--master-port`` is not."""


@attrs.frozen
class Start:
    """The job that the verdict recommends: of all groups, or of fewer that do more.

    Attributes:
        groups: that train; left_out: the others.
        commands: a shell's lines, by host.
        samples: of its step; of_all: of a step of all groups.
        accumulate: batches of a rank in a step.
        local_batches: by group, where they differ.
        caller: what the script calls, for the line and for messages.
        better: options of the plan that the verdict recommends in the place of this one; empty where it is this one.
        lowers_nothing: it recommends none, and this plan is none.
    """

    groups: tuple[str, ...]
    left_out: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]
    samples: int
    of_all: int
    accumulate: int = 1
    local_batches: Mapping[str, int] = {}
    caller: Caller = FUNCTIONS_JOB
    better: str = ""
    lowers_nothing: bool = False

    def sentences(self, folder: Path) -> list[str]:
        """What to type, each line of it indented, and what it means for the script; ``folder`` is the run folder."""
        several = len({host for host, _ in self.commands}) > 1
        told = [f"  {host}: {line}" if several else f"  {line}" for host, line in self.commands]
        as_it_is = f"what the verdict recommends is planned by qsync prepare … {self.better}; as it is, " if self.better else ""
        if self.left_out:
            batches = "batch" if self.accumulate == 1 else f"{self.accumulate} batches"
            told = [
                f"{as_it_is}{' and '.join(self.left_out)} {'is' if len(self.left_out) == 1 else 'are'} better left out; train "
                "without, by:",
                *told,
                f"a step then has {self.samples} samples, each rank its own {batches}, and not the {self.of_all} of all groups; "
                f"where the learning rate is for {self.of_all}, {self.caller.keep_samples}",
            ]
        else:
            told = [f"{as_it_is}train by:", *told]
        if self.local_batches:
            sizes = ", ".join(f"{size} a rank of {group}" for group, size in self.local_batches.items())
            told.append(
                f"local batches differ ({sizes}): the script takes applied.local_batch samples a step, and calls "
                "applied.weight_gradients(ddp) (docs/uneven-batches.md)"
            )
        alike = (
            "; under this plan it lowers nothing, and the script may leave it out: it only passes on how DistributedDataParallel "
            "communicates"
        )
        return [*told, f"the line of the script is {self.caller.line(folder)}{alike if self.lowers_nothing else ''}"]


def how_to_start(
    run: RunFolder,
    plan: PrecisionPlan,
    here: Sequence[Group],
    script: Sequence[str],
    *,
    torchrun: bool = True,
    caller: Caller | None = None,
) -> Start | None:
    """What to start; None where some of the recommended groups are not here, or have no plan.

    Args:
        plan: for all groups of its cluster.
        here: the groups that are here, with the machines of their ranks.
        script: what trains, with arguments.
        torchrun: whether torchrun starts it; without, there is one process.
        caller: what the script calls, where a script has said the job.
    """
    kept, way = plan.recommended_groups or tuple(entry.group for entry in plan.groups), plan.recommended_way
    # The best way of fewer groups may be one that the options of this plan give their plan too, as uneven batches are.
    planned = way is not None and set(way.groups) != set(kept) and _is_planned(run, way)
    if way is not None and planned:
        kept = way.groups
    if not run.plan(kept).is_file() or set(kept) - {group.name for group in here}:
        return None
    chosen = run.load_plan(kept)
    better = "" if way is None or planned else way.options
    is_it = way is not None and set(way.groups) == set(kept) and dict(way.local_batches) == dict(chosen.local_batches)
    lowers_nothing = bool(better) and is_it and not _lowers(chosen)
    return Start(
        groups=kept,
        left_out=tuple(entry.group for entry in plan.groups if entry.group not in kept),
        commands=tuple(_commands(chosen, here, script)) if torchrun else ((here[0].first.host, shlex.join(("python", *script))),),
        samples=_samples(chosen),
        of_all=_samples(plan),
        accumulate=plan.accumulate,
        local_batches=chosen.local_batches if len(set(chosen.local_batches.values())) > 1 else {},
        caller=caller or (_FUSING if _fuses(chosen) else FUNCTIONS_JOB),
        better="" if lowers_nothing else better,
        lowers_nothing=lowers_nothing,
    )


def _is_planned(run: RunFolder, way: RecommendedWay) -> bool:
    """Whether the folder's own plan of a way's groups is as fast as the way."""
    return run.plan(way.groups).is_file() and run.load_plan(way.groups).predicted_iteration_ns <= way.iteration_ns * WORTH_IT


def _lowers(plan: PrecisionPlan) -> bool:
    """Whether some operator runs in another way than in the base precision."""
    lowered = (one.variant != Variant.plain(entry.base) for entry in plan.groups for one in entry.assignments.values())
    return _fuses(plan) or any(lowered)


def _fuses(plan: PrecisionPlan) -> bool:
    """Whether it runs chains as fused kernels, which the compiled model has."""
    return any(chain.variant.fused for entry in plan.groups for chain in entry.chains.values())


def _samples(plan: PrecisionPlan) -> int:
    return plan.accumulate * sum(entry.count * plan.local_batches[entry.group] for entry in plan.groups)


def _commands(plan: PrecisionPlan, here: Sequence[Group], script: Sequence[str]) -> list[tuple[str, str]]:
    """Each machine's name and the line for it, of which one with several groups has several; a training group is first."""
    order = sorted(plan.groups, key=lambda entry: entry.role is not Role.TRAIN)
    members = {group.name: group.members for group in here}
    places = [(entry, host, count) for entry in order for host, count in Counter(m.host for m in members[entry.group]).items()]
    machines = tuple(GroupMachines.of(entry, node, 1, count) for node, (entry, _, count) in enumerate(places))
    hosts = [host for _, host, _ in places]
    first = next((member.host for group in here for member in group.members if member.rank == 0), "")
    meeting = _meeting(hosts, first)
    found = []
    job = PlannedJob.of(plan, machines, len(machines))
    for host, command in zip(hosts, machine_commands(job, meeting, training(script)), strict=True):
        on_host = [member for group in here for member in group.members if member.host == host]
        own = [member for member in members[command.group] if member.host == host]
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(member.gpu for member in own)} if _chooses_gpus(own, on_host) else {}
        found.append((host, attrs.evolve(command, environment={**command.environment, **gpus}).line()))
    return found


def _meeting(hosts: Sequence[str], first: str) -> Meeting:
    """Where torchruns on these machines meet: as those did that started this job, whose rank 0 was on machine ``first``.

    One torchrun alone needs no place.  Those of a rendezvous with a name of its own (``--standalone``, ``--rdzv-backend c10d``) do
    not tell their ranks the port that it was given.
    """
    if len(hosts) == 1:
        return Meeting(hosts[0], standalone=True)
    fixed = os.environ if os.environ.get("TORCHELASTIC_RUN_ID", _UNNAMED) == _UNNAMED else {}
    meeting = Meeting(hosts[0] if len(set(hosts)) > 1 else _HERE)
    if hosts[0] == first:
        meeting = attrs.evolve(meeting, host=fixed.get("MASTER_ADDR", meeting.host))
    return attrs.evolve(meeting, port=int(fixed.get("MASTER_PORT", meeting.port)))


def _chooses_gpus(own: Sequence[Participant], on_host: Sequence[Participant]) -> bool:
    """Whether a machine has other GPUs in this job than these, of which torchrun's processes would take the first ones."""
    return all(member.gpu for member in own) and {member.gpu for member in own} != {member.gpu for member in on_host}
