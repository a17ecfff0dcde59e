"""What the ranks of a job have of their GPUs, held against the plan: the same data on every rank, so the same sentence.

docs/training.md#gpus-of-a-job says what is refused and what gives a warning.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn

from qsync_core.errors import CompatibilityError, PlanError, QSyncError
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.distributed.exchange import by_value, rank_list
from qsync_torch.distributed.process_group import in_process_group
from qsync_torch.distributed.ranks import told_by_all
from qsync_torch.sharing.share import green_share_in_force

_SHARE_TOLERANCE = 0.1
"""The part of the SMs that may be missing: MPS rounds a percentage to what the chip can give, such as 8 of an H200's 132 SMs."""


@attrs.frozen
class RankFacts:
    """What one rank says of itself.

    Attributes:
        device: name of the GPU that it computes on; empty on a CPU, or where the model is not on its device yet.
        gpu: that GPU's UUID, which no other GPU has.
        sms: streaming multiprocessors of it that the process may use, as CUDA says: under MPS its share of them.
        green: it runs in a green context, of which that number says nothing.
        nccl: version of NCCL where the process group uses it; else empty.
        allow_share: its script allows another share than the plan's (``allow_flags=["share"]``).
    """

    group: str
    device: str = ""
    gpu: str = ""
    sms: int = 0
    green: bool = False
    nccl: str = ""
    allow_share: bool = False


def check_job(
    what: str,
    plan: PrecisionPlan,
    group: str,
    model: nn.Module,
    allowed: Collection[str],
    caller: Caller = BY_HAND,
    *,
    warn: bool = True,
) -> dict[int, str]:
    """Compare all ranks with the plan and with each other; call it on every rank.

    Args:
        what: the call, as its user knows it; equal on all ranks.
        model: on its device, or not yet.
        allowed: ``allow_flags`` of ``apply_``.
        warn: whether rank 0 says what makes the plan's times void without being refused.

    Returns:
        The device group of every rank.

    Raises:
        CompatibilityError, PlanError: on every rank, in the same words (:func:`job_problem`).
        RankError: on every rank that calls this, when another does not.
    """
    mine = rank_facts(group, model, allowed)
    heard = told_by_all(f"{what}, comparing GPUs", {"facts": json.dumps(attrs.asdict(mine))})
    ranks = {rank: RankFacts(**json.loads(facts["facts"])) for rank, facts in heard.items()}
    if problem := job_problem(plan, ranks, caller):
        raise problem
    if warn and len(ranks) > 1 and dist.get_rank() == 0 and (warning := job_warning(plan, ranks, caller)):
        warnings.warn(warning, stacklevel=4)
    return {rank: facts.group for rank, facts in ranks.items()}


def rank_facts(group: str, model: nn.Module, allowed: Collection[str]) -> RankFacts:
    """What this rank has, on the device that its model is on or its process group is bound to."""
    index, backends = _gpu_index(model), _backends()
    # A job on CPUs may have named no backend, and then has both.
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if "nccl" in backends and (index is not None or "gloo" not in backends)
        else ""
    )
    facts = RankFacts(group, nccl=nccl, allow_share="share" in allowed)
    if index is None:
        return facts
    found = torch.cuda.get_device_properties(index)
    return attrs.evolve(
        facts, device=found.name, gpu=str(found.uuid), sms=found.multi_processor_count, green=green_share_in_force() is not None
    )


def _gpu_index(model: nn.Module) -> int | None:
    parameter = next((parameter for parameter in model.parameters() if parameter.device.type == "cuda"), None)
    if parameter is not None:
        return parameter.device.index
    whole = dist.group.WORLD if _backends() else None
    bound = whole.bound_device_id if whole is not None else None
    return bound.index if bound is not None and bound.type == "cuda" else None


def _backends() -> str:
    """Name the backends of the process group, such as ``cpu:gloo,cuda:nccl``; empty outside one."""
    if not in_process_group():
        return ""
    found: str = dist.get_backend_config()
    return found if dist.is_nccl_available() else found.replace("nccl", "")


def job_problem(plan: PrecisionPlan, ranks: Mapping[int, RankFacts], caller: Caller = BY_HAND) -> QSyncError | None:
    """Why the job cannot run, or not at the plan's times: the first of its problems; None where there is none."""
    versions = {rank: facts.nccl for rank, facts in ranks.items() if facts.nccl}
    if len(set(versions.values())) > 1:
        return CompatibilityError(
            f"the ranks of this job run different versions of NCCL ({by_value(versions)}); install the same torch and nvidia-nccl "
            "package on all"
        )
    together: dict[str, list[int]] = {}
    for rank, facts in ranks.items():
        if facts.gpu:
            together.setdefault(facts.gpu, []).append(rank)
    shares = {group.group: group.device.share for group in plan.groups}
    for gpu, who in together.items():
        if len(who) > 1 and (problem := _crowded(gpu, who, ranks, shares, caller)):
            return PlanError(problem)
    problem = _unlimited(ranks, shares)
    return PlanError(problem) if problem else None


def _crowded(gpu: str, who: Sequence[int], ranks: Mapping[int, RankFacts], shares: Mapping[str, float], caller: Caller) -> str:
    """What is wrong with several ranks on one GPU."""
    where = f"{rank_list(who)} are on one GPU ({ranks[who[0]].device}, {gpu})"
    if any(ranks[rank].nccl for rank in who):
        return (
            f"{where}, which NCCL does not allow: give each rank a GPU of its own (torch.cuda.set_device), or "
            'use init_process_group("gloo")'
        )
    total = sum(shares.get(ranks[rank].group, 1.0) for rank in who)
    if total <= 1 + 1e-9 or all(ranks[rank].allow_share for rank in who):
        return ""
    groups = ", ".join(dict.fromkeys(repr(ranks[rank].group) for rank in who))
    exception = caller.with_option("allow_flags=['share']")
    return (
        f"{where}, and the shares of their groups ({groups}) add up to {total:g} of it: move a rank to another GPU, or give the "
        f"groups smaller shares in the cluster file, and {caller.profile_again}; {exception} runs "
        "the job all the same, at other times than were predicted"
    )


def _unlimited(ranks: Mapping[int, RankFacts], shares: Mapping[str, float]) -> str:
    """Which ranks see another part of their GPU's SMs than their share, by a rank that has the whole of such a GPU."""
    for device in dict.fromkeys(facts.device for facts in ranks.values() if facts.sms):
        here = {rank: facts for rank, facts in ranks.items() if facts.device == device and facts.sms}
        whole = max((facts.sms for facts in here.values() if shares.get(facts.group, 1.0) == 1), default=0)
        for rank, facts in here.items():
            share = shares.get(facts.group, 1.0)
            if not whole or facts.green or facts.allow_share or abs(facts.sms / whole - share) <= _SHARE_TOLERANCE:
                continue
            return (
                f"rank {rank} may use {facts.sms} of the {whole} SMs of its {device}, but its group {facts.group!r} has share "
                f"{share:g}: call qsync_torch.use_share at the top of the script, before CUDA starts (docs/shared-gpus.md)"
            )
    return ""


def job_warning(plan: PrecisionPlan, ranks: Mapping[int, RankFacts], caller: Caller = BY_HAND) -> str:
    """How many ranks the job has of each group, where the plan was made for other numbers; else empty."""
    planned = {group.group: group.count for group in plan.groups}
    found = Counter(facts.group for facts in ranks.values())
    if all(found[group] == count for group, count in planned.items()):
        return ""
    differing = ", ".join(
        f"{found[group]} instead of {count} of {group!r}" for group, count in planned.items() if found[group] != count
    )
    again = "plan again from the stored profiles, with these counts in the cluster file"
    if caller.run is not None:
        again = f"{caller.plan_again} with these ranks"
    return f"the plan's times do not hold: this job has other ranks than it was made for ({differing}); {again}"
