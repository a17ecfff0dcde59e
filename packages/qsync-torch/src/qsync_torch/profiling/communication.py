"""What communication costs a job: all-reduces, what they take from compute, copies into buckets, the broadcast of buffers.

See docs/design/simulator.md#communication.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import attrs
import torch
import torch.distributed as dist

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.artifacts.files import digest
from qsync_core.errors import ClusterError, JobError, PlanError, RankError
from qsync_core.ir.communication import MOST_BUCKET_MB, CollectiveCosts, MeasuredCollectives, buckets_under
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.profile import DeviceType
from qsync_core.progress import ProgressCallback, silent
from qsync_torch.devices import device_type, parse_device, software_versions
from qsync_torch.distributed.buffers import broadcast_together
from qsync_torch.distributed.exchange import rank_list
from qsync_torch.distributed.nccl import CHANNEL_VARIABLES, nccl_options
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.distributed.ranks import KIND_OF_DEVICE, together, told_by_all
from qsync_torch.job import Job, check_same_model
from qsync_torch.profiling.collective import collective_ns, longer, maximum_over_ranks, measure_collective
from qsync_torch.profiling.contention import Backward, Slowdown, measure_beside_compute, measure_slowdown
from qsync_torch.profiling.whole_step import StepRunner
from qsync_torch.timing import make_stopwatch

WHAT = "communicate"
MAX_CTAS = (0, 2, 4, 8, 16)
"""Tried with NCCL; 0 is its own choice."""
BUCKET_CAPS_MB = (None, 50.0, 100.0, MOST_BUCKET_MB)
"""Bucket caps whose sizes are measured; the last one gives one bucket."""
_MOST_SIZES = 8
_REPEATS = 7
_COPY_REPEATS = 5


@attrs.frozen
class _Member:
    """What a rank says of itself: its group and device, the GPU's own number (empty on a CPU) and its streaming multiprocessors."""

    group: str
    device: DeviceType
    software: Mapping[str, str]
    gpu: str = ""
    sms: int = 0

    @classmethod
    def here(cls, group: str, device: torch.device, share: float) -> _Member:
        """This rank."""
        kind, software = device_type(device, share), {name: text for name, text in software_versions(device).items() if text}
        if device.type != "cuda":
            return cls(group, kind, software)
        properties = torch.cuda.get_device_properties(device)
        return cls(group, kind, software, str(getattr(properties, "uuid", "")), properties.multi_processor_count)


@attrs.frozen(eq=False)
class ProcessGroups:
    """Process groups of one set of ranks, all that a measurement takes; every rank of the job makes them, also one outside the set.

    PyTorch names a group that only its own ranks make after their numbers, and one that all ranks make after a count.  A second
    group of the same name reads from the store what the first one's ranks left there: NCCL's identifier, whose listener is closed.
    A group costs little until its communicator is initialised, which its first collective does.

    Attributes:
        group: of the job's backend; None is that of all ranks.
        under_ctas: with NCCL, one for each number of CTAs in :data:`MAX_CTAS`, until it is destroyed.
    """

    group: dist.ProcessGroup | None
    under_ctas: dict[int, dist.ProcessGroup]

    @classmethod
    @contextmanager
    def of(cls, ranks: Sequence[int] | None = None) -> Iterator[ProcessGroups]:
        """Make the groups of some ranks, by default of all; they are destroyed at the end of the block."""
        made = cls(None if ranks is None else dist.new_group(ranks), {})
        if "nccl" in str(dist.get_backend()):
            for max_ctas in MAX_CTAS:
                made.under_ctas[max_ctas] = dist.new_group(ranks, backend="nccl", pg_options=nccl_options(max_ctas))
        try:
            yield made
        finally:
            if ranks is None or dist.get_rank() in ranks:
                for group in (*made.under_ctas.values(), *filter(None, [made.group])):
                    dist.destroy_process_group(group)

    @contextmanager
    def communicator(self, max_ctas: int, device: torch.device) -> Iterator[dist.ProcessGroup]:
        """The group of a number of CTAs, its communicator initialised; destroyed at the end of the block."""
        with together(WHAT, group=self.group):  # so that no rank enters a communicator's initialisation alone
            group = self.under_ctas[max_ctas]
        try:
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
            torch.cuda.synchronize(device)
            yield group
        finally:
            del self.under_ctas[max_ctas]
            dist.destroy_process_group(group)


def measure_communication(
    job: Job,
    dag: PrecisionDag,
    *,
    group: str,
    device: str | torch.device = "cpu",
    share: float = 1.0,
    counts: Mapping[str, int] | None = None,
    among: ProcessGroups | None = None,
    progress: ProgressCallback = silent,
    note: Callable[[str], None] = lambda text: None,
) -> CollectiveCosts:
    """Measure what communication costs a job, in the process group that all of its ranks have initialised.

    All its ranks call it, each with its own group.  With NCCL, all-reduces are measured under several numbers of CTAs, and for each
    the slowdown of every group's compute while a collective is open; elsewhere under the library's own choice, with a slowdown of
    0.

    Args:
        job: what is trained; its model is copied to the device and not changed.
        dag: its graph, the same on all ranks.
        group: the device group that this rank is of.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        share: share of the device that the job gets; recorded.
        counts: how many ranks each group must have, where that is known.
        among: of the job's ranks where they are not all that there are; what a job of them alone would pay.
        progress: receives how far it is.
        note: receives sentences for people; on every rank.

    Returns:
        The costs, equal on all ranks.

    Raises:
        RankError: outside a process group of two or more ranks; when another rank does not come or fails.
        QSyncError: when the graph is of another model or has no gradients; when groups are not as ``counts`` says, or one has
            devices of two types; when two ranks have one GPU, over NCCL.  On every rank.
    """
    job_group = None if among is None else among.group
    check_not_alone(job_group)
    variables = " ".join(f"{name}={os.environ[name]}" for name in CHANNEL_VARIABLES if os.environ.get(name))
    with together(WHAT, {"graph": digest(dag)[:16], "NCCL's channels": variables or "its own"}, group=job_group) as facts:
        target = parse_device(device)
        facts[KIND_OF_DEVICE] = target.type
        check_same_model(job, dag)
        sizes = bucket_sizes(dag)
        mine = _Member.here(group, target, share)
    with_nccl = target.type == "cuda" and "nccl" in str(dist.get_backend(job_group))
    members = _heard(mine, counts, job_group, one_rank_a_gpu=with_nccl)
    tried = MAX_CTAS if with_nccl and not variables else (0,)
    if with_nccl and variables:
        note(f"{variables} in the environment stands above what a process group asks of NCCL, so only that is measured")

    groups = tuple(dict.fromkeys(member.group for member in members.values()))
    total, done = 2 + len(tried) * (1 + len(groups)), 0

    def advance(what: str) -> None:
        nonlocal done
        progress(done, total, what)
        done += 1

    measured = []
    with (
        torch.cuda.device(target) if target.type == "cuda" else nullcontext(),
        ProcessGroups.of() if among is None else nullcontext(among) as process_groups,
    ):
        with together(WHAT, slow=True, group=job_group):
            runner = StepRunner.start(job, target, batches=1)
            advance("copies of gradients")
            copied = _copy_ns_per_byte(runner.model, dag, target, len(members))
        copies = {rank: float(said["copy"]) for rank, said in told_by_all(WHAT, {"copy": repr(copied)}, job_group).items()}
        advance("broadcast of buffers")
        broadcast_ns = _broadcast_ns(runner.model, target, job_group)
        with together(WHAT, slow=True, group=job_group):
            backward = Backward(runner, target) if with_nccl else None
            compute_ns = 0 if backward is None else backward.alone_ns()
            waiting = torch.zeros(max(bucket.nbytes for bucket in dag.buckets) // 4, dtype=torch.float32, device=target)
        for max_ctas in tried:
            label = f"{max_ctas} CTAs" if max_ctas else "its own CTAs"
            with process_groups.communicator(max_ctas, target) if with_nccl else nullcontext(job_group) as process_group:
                advance(f"all-reduces, {label}")
                model = measure_collective(sizes, target, repeats=_REPEATS, group=process_group)
                assert model is not None  # there are ranks and buckets
                model = attrs.evolve(model, compute_share=maximum_over_ranks(model.compute_share, target, job_group))
                lost: dict[str, float] = {}
                if backward is not None and process_group is not None:
                    largest_ns = model.cost_ns(waiting.nbytes)
                    beside = measure_beside_compute(backward, process_group, waiting, largest_ns, compute_ns, WHAT)
                    model = longer(model, beside.factor)
                    lost = {name: maximum_over_ranks(beside.lost if name == group else 0.0, target, job_group) for name in groups}
                    taken = ", ".join(f"{share:.0%} ({name})" for name, share in lost.items())
                    note(
                        f"beside compute, a collective of {label} takes {beside.factor:.2f} times as long, and lengthens "
                        f"compute by {taken} of that"
                    )
                slowdown = dict.fromkeys(groups, 0.0)
                for name in groups:
                    advance(f"compute of {name}, {label}")
                    if backward is None or process_group is None:
                        continue
                    own = [rank for rank, member in members.items() if member.group == name]
                    measuring = own if len(own) < len(members) else own[:-1]  # someone must hold the collective open
                    found = measure_slowdown(backward, process_group, waiting, measuring, WHAT)
                    slowdown[name] = found.share
                    note(_sentence(name, label, found, max_ctas, members[own[0]].sms))
            transfer_share = {name: max(0.0, share - slowdown[name]) for name, share in lost.items()}
            measured.append(MeasuredCollectives(max_ctas, model, slowdown, transfer_share))
    progress(total, total, "")
    first = {name: next(member for member in members.values() if member.group == name) for name in groups}
    return CollectiveCosts(
        model=dag.model,
        dag_digest=digest(dag),
        ranks={name: sum(member.group == name for member in members.values()) for name in groups},
        devices={name: member.device for name, member in first.items()},
        software={name: member.software for name, member in first.items()},
        measured=tuple(measured),
        copy_ns_per_byte={name: max(copies[rank] for rank, member in members.items() if member.group == name) for name in groups},
        broadcast_ns=broadcast_ns,
    )


def check_not_alone(among: dist.ProcessGroup | None = None) -> None:
    """Refuse a process that is not one of several.

    Raises:
        RankError: outside a process group of two or more ranks.
    """
    if rank_count(among) < 2:
        raise RankError(
            "communication is measured among all ranks of a job, and this process is alone: start it with torchrun on every "
            "machine, as training is started"
        )


def bucket_sizes(dag: PrecisionDag) -> tuple[int, ...]:
    """The sizes of buckets that are measured, in bytes: those under :data:`BUCKET_CAPS_MB`, eight of them where there are more.

    Raises:
        JobError: for a graph without gradients.
    """
    try:
        layouts = [buckets_under(dag, cap) for cap in BUCKET_CAPS_MB]
    except ValueError:  # some parameters get no gradient: only the graph's own buckets are known
        layouts = [dag.buckets]
    sizes = sorted({bucket.nbytes for buckets in layouts for bucket in buckets})
    if not sizes:
        raise JobError(f"{dag.model} has no gradients to reduce: none of its parameters is trained")
    if len(sizes) <= _MOST_SIZES:
        return tuple(sizes)
    return tuple(sizes[position * (len(sizes) - 1) // (_MOST_SIZES - 1)] for position in range(_MOST_SIZES))


def _heard(
    mine: _Member, counts: Mapping[str, int] | None, among: dist.ProcessGroup | None, *, one_rank_a_gpu: bool
) -> dict[int, _Member]:
    """The members of all ranks of the job, which all of them judge alike.

    Raises:
        QSyncError: see :func:`measure_communication`.
    """
    told = told_by_all(WHAT, {"member": json.dumps(to_plain(mine))}, among)
    members = {rank: from_plain(json.loads(said["member"]), _Member) for rank, said in sorted(told.items())}
    by_group: dict[str, list[int]] = {}
    by_gpu: dict[str, list[int]] = {}
    for rank, member in members.items():
        by_group.setdefault(member.group, []).append(rank)
        by_gpu.setdefault(member.gpu or f"none of rank {rank}", []).append(rank)
    for name, expected in (counts or {}).items():
        found = by_group.get(name, [])
        if len(found) != expected:
            raise ClusterError(
                f"group {name!r} of the cluster file has {expected} ranks, and {len(found)} of this job's {len(members)} processes "
                f"are in it{f' ({rank_list(found)})' if found else ''}: start the whole job, each process in its group "
                "(QSYNC_GROUP)"
            )
    for name, ranks in by_group.items():
        devices = {members[rank].device for rank in ranks}
        if len(devices) > 1:
            which = " and ".join(sorted(f"{device.name} at {device.share:.0%}" for device in devices))
            raise PlanError(f"group {name!r} has devices of different types ({which}, {rank_list(ranks)}): give each its own group")
    if one_rank_a_gpu and (twice := next((ranks for ranks in by_gpu.values() if len(ranks) > 1), None)):
        raise RankError(
            f"{rank_list(twice)} have the same GPU, which NCCL refuses: give each process its own, with --device or "
            "CUDA_VISIBLE_DEVICES, or communicate over gloo"
        )
    return members


def _sentence(name: str, label: str, found: Slowdown, max_ctas: int, sms: int) -> str:
    bound = " at least (the collective ended before compute did)" if found.is_bound else ""
    estimate = f"; {max_ctas} of {sms} SMs are {max_ctas / sms:.3f}" if max_ctas and sms else ""
    return f"while a collective of {label} is open, compute of group {name} loses {found.share:.3f}{bound}{estimate}"


def _copy_ns_per_byte(model: torch.nn.Module, dag: PrecisionDag, device: torch.device, ranks: int) -> float:
    """Device time of copying a model's gradients into buckets, divided by the number of ranks as DistributedDataParallel does it on
    the way, and back, per byte of gradients."""
    parameters = dict(model.named_parameters())
    gradients = [torch.ones_like(parameters[name].detach()) for bucket in dag.buckets for name in bucket.parameters]
    views = [torch.empty_like(gradient) for gradient in gradients]
    factor = 1 / ranks

    def copy() -> None:
        for view, gradient in zip(views, gradients, strict=True):
            torch.mul(gradient, factor, out=view)
        for view, gradient in zip(views, gradients, strict=True):
            gradient.copy_(view)

    stopwatch = make_stopwatch(device)
    times = [stopwatch.time_series([copy])[1] for _ in range(1 + _COPY_REPEATS)][1:]
    return statistics.median(times) / sum(gradient.nbytes for gradient in gradients)


def _broadcast_ns(model: torch.nn.Module, device: torch.device, among: dist.ProcessGroup | None) -> int:
    """One broadcast of a model's buffers, coalesced as DistributedDataParallel does it; 0 where there are none."""
    buffers: Sequence[torch.Tensor] = list(model.buffers())
    if not buffers:
        return 0
    group = among or dist.group.WORLD
    return collective_ns(
        lambda: broadcast_together(group, buffers, 0),
        device,
        _REPEATS,
        among,
    )
