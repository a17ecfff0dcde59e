"""``qsync prepare`` from end to end; every rank of the job runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from qsync_core.artifacts.files import digest, from_bytes, to_bytes
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.cluster_file import MAX_FILE_BYTES, parse_cluster
from qsync_core.errors import ClusterError, PlanError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.plugins.installing import pip_install
from qsync_core.run_folder import RunFolder, key_of
from qsync_torch.caller import Caller
from qsync_torch.capturing.script import Said, job_of_script, unsaid_autocast
from qsync_torch.devices import any_chips_ladder, job_software
from qsync_torch.distributed.bounded_store import rank_timeout_s
from qsync_torch.distributed.mailbox import Mailbox
from qsync_torch.distributed.ranks import (
    KIND_OF_DEVICE,
    VERSIONS,
    members_to_be,
    naming_lost_ranks,
    process_group_from_environment,
    together,
    versions_text,
)
from qsync_torch.distributed.watch import watched
from qsync_torch.job import Job, check_same_model, describe_optimizer
from qsync_torch.kernels.installed import check_store
from qsync_torch.load_job import find_job, is_script, job_code, load_job
from qsync_torch.prepare.asked import Asked
from qsync_torch.prepare.board import Board
from qsync_torch.prepare.cluster_text import cluster_text, is_changed, with_links
from qsync_torch.prepare.folder import CLUSTER, GRAPH, WHAT, Folder, Made, merge_disks, open_folder
from qsync_torch.prepare.ledger import Parts
from qsync_torch.prepare.measuring import SAME_ON_ALL_RANKS, Bench, Probe, collective_inputs
from qsync_torch.prepare.participants import Group, Participant, Wish, crowded, find_groups, form_groups, gather, waves
from qsync_torch.prepare.roles import (
    alike_at_last,
    all_alike,
    compared,
    contradiction,
    described_groups,
    frozen_fills,
    memory_of,
    of_one_kind,
    otherwise,
    renamed,
    roles_said,
    short_of_memory,
    to_repeat,
    unstorable,
    with_storages,
)
from qsync_torch.prepare.starting import Start, how_to_start
from qsync_torch.profiling.communication import ProcessGroups, measure_communication
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.job_tuning import TUNING_S

if TYPE_CHECKING:
    from qsync_torch.prepare.planning import Planning, Step

Load = Callable[[], tuple[Job, Caller | None]]
"""Gives the job, and what the script calls that says it; None where a function makes it."""
STEPS, LAST_STEPS = 3, 2
"""The number of steps of planning, and of those that follow once."""
BATCH_ROUNDS = 3
"""How often plans are made anew because steps of other local batches were measured."""
_LONGEST_PART_S = 24 * 3600.0
"""How long one part may take while its process shows that it lives."""


@attrs.frozen
class Request:
    """What a rank is asked to prepare.

    Attributes:
        job: as ``load_job`` takes it, or a script with the line ``qsync.hybrid(...)``; arguments: the script's own.
        output: the run folder, on this machine.
        batch_size: in the place of the job's own.
        cluster: text of a cluster file that the person gives; wishes: of groups that are formed here, by name.
        chains: profiles measure fused chains, and plans may fuse them.
        tune_s: for how long a GPU's kernels are tuned, in seconds.
        fresh: measure everything anew.
    """

    job: str
    output: Path
    device: torch.device
    share: float = 1.0
    arguments: tuple[str, ...] = ()
    batch_size: int | None = None
    cluster: str | None = None
    wishes: Mapping[str, Wish] = {}
    asked: Asked = attrs.field(factory=Asked)
    chains: bool = False
    tune_s: float = TUNING_S
    fresh: bool = False
    quiet: bool = False


@attrs.frozen
class PlannedGroups:
    """A set of groups that may be left: its plan, or why there is none."""

    groups: tuple[str, ...]
    plan: PrecisionPlan | None
    why_none: str = ""


@attrs.frozen
class Prepared:
    """What is in the run folder now.

    Attributes:
        run: the folder; cluster: its groups, with ladders below the job's base.
        planned: every set of groups, the whole job first.
        made: parts that were made now; the others were kept.
        report: the page; None where no installed package writes one.
        start: how training is started; on rank 0, None where some of the recommended groups are not here.
    """

    rank: int
    run: RunFolder
    cluster: Cluster
    planned: tuple[PlannedGroups, ...]
    made: tuple[str, ...]
    seconds: float
    report: Path | None = None
    start: Start | None = None


def prepare(request: Request) -> Prepared:
    """Prepare a job on all ranks that torchrun has started, or on this process alone; every rank calls it.

    Raises:
        QSyncError: on every rank; the folder then continues from what is finished.
    """
    started = time.monotonic()
    with watched(WHAT, members_to_be("watch") or Mailbox.of_group(None)) as gone:
        # A script runs before there is a process group, because it may make that itself.
        said = _of_script(request) if is_script(request.job) else None
        with process_group_from_environment(request.device, said.backend if said else "") as rank, naming_lost_ranks(WHAT, gone):
            return _prepare(request, _load(request, said), rank, started)


def _prepare(request: Request, load: Load, rank: int, started: float) -> Prepared:
    members = Mailbox.of_group(None)
    if members is not None:
        members = attrs.evolve(members, patience_s=_LONGEST_PART_S)
    board = Board(members)
    with board.shown(quiet=request.quiet), open_folder(request.output, members) as folder, job_code(request.job):
        flow = _Flow(request, folder, board)
        cluster = flow.run(load)
        planned = flow.planned(cluster) if rank == 0 else ()
        report = folder.run.report if "report" in folder.parts else None
        start = flow.start(cluster) if rank == 0 else None
    return Prepared(
        rank, folder.run, flow.under_base(cluster), planned, tuple(folder.made), time.monotonic() - started, report, start
    )


def _load(request: Request, said: Said | None) -> Load:
    """How the job is loaded: a script's is there already."""
    if said is None:
        find_job(request.job)  # before there is a run folder
        return lambda: (load_job(request.job, request.batch_size), None)
    job = said.job if request.batch_size is None else attrs.evolve(said.job, batch_size=request.batch_size)
    return lambda: (job, said.caller)


def _of_script(request: Request) -> Said:
    """Run the script now, on every rank or on none.

    Raises:
        QSyncError: on every rank, also where one does not come to its line while another has.
    """
    members = members_to_be("script", rank_timeout_s())
    with together(f"the line of {Path(request.job).name}", group=members, may_hang=True):
        return job_of_script(request.job, request.arguments)


@attrs.define(eq=False)
class _Flow:
    """One rank's way through all parts."""

    request: Request
    folder: Folder
    board: Board
    _on_disk: Parts = attrs.field(factory=dict)
    _text: str = ""
    _groups: Sequence[Group] = ()
    _caller: Caller | None = None
    _communication: Mapping[str, Any] = attrs.field(factory=dict)
    _base: Precision = Precision.FLOAT32

    def run(self, load: Load) -> Cluster:
        """All parts; the cluster as its file says it."""
        request, folder = self.request, self.folder
        wishes = " ".join(f"{name}: {wish}" for name, wish in sorted(request.wishes.items()))
        self.board.stage("loading the job")(0, 1, "")
        if folder.members is None and request.device.type == "cuda" and (gpus := torch.cuda.device_count()) > 1:
            self.board.note(
                f"this machine has {gpus} GPUs, and prepares one; for all: torchrun --nproc-per-node {gpus} -m qsync prepare"
            )
        with folder.together({VERSIONS: versions_text(), "--group": wishes}, slow=True) as facts:
            if folder.rank == 0 and find_spec("qsync_planner") is None:
                raise PlanError(
                    f"qsync prepare plans, which needs qsync-planner; install it with: {pip_install('qsync-torch', 'plan')}"
                )
            if folder.rank == 0:
                self._check_asked()
            check_store(request.device)
            job, self._caller = load()
            facts["optimizer"] = describe_optimizer(job)
            facts[KIND_OF_DEVICE] = request.device.type
            self.board.stage("loading the job")(1, 1, "")
        if is_script(request.job):
            self.board.note_of_job(unsaid_autocast(request.job, job))
        self._communication = job.communication
        if job.communication:
            self.board.note_of_job(
                f"{request.job} gives its DistributedDataParallel nothing of the plan's, so plans are for the way in which it "
                "communicates by itself; with **applied.ddp_options() there they choose the fastest"
            )
        if job.compiles:
            self.board.note_of_job(
                f"{request.job} compiles its model, and whole steps are measured so ({job.compiles}, in its default mode); where "
                "training does not, say qsync.hybrid(..., compiles=False)"
            )
        self._on_disk = merge_disks(folder, fresh=request.fresh)
        dag = self._trace(job)
        with folder.together():
            if folder.rank == 0 and request.asked.keep:
                from qsync_planner.allocator.keep import kept_operators

                kept_operators(dag, request.asked.keep)  # before anything is measured
        self._base = dag.base
        me = Participant.here(folder.rank, request.device, request.share, job_software(job.model, request.device))
        participants = gather(folder, me)
        described = self._described()
        groups = find_groups(participants, described) if described else form_groups(participants, request.wishes)
        self._groups = groups
        self.board.note_of_job(crowded(participants))
        known = [name.removeprefix("profile ") for name in folder.parts if name.startswith("profile ")]
        if described is None and not request.wishes:
            self.board.note_of_job(of_one_kind(groups))
        self.board.note_of_job(renamed(known, [group.name for group in groups]))
        own = next(group for group in groups if me.rank in group.ranks)
        if len(participants) > 1:
            self.board.label = f"{own.name}, " if len(own.ranks) == 1 else f"{own.name} (rank {me.rank}), "
        bench = Bench(job, dag, request.device, me, folder, self.board, request.chains, request.tune_s)
        with folder.together(slow=True):  # before minutes are spent on a device that is refused
            if me.rank == own.first.rank:
                bench.check_base(own)
        self._communicate(bench, groups, own)
        cluster = self._agree_on_cluster(bench, groups, described)
        if described is None:
            self.board.note_of_job(compared(groups, self._probes_of(groups), dag.base))
        self._measure(bench, groups, cluster)
        while described is None and (settled := self._agree_on_cluster(bench, groups, None)) != cluster:
            # The groups that had not been expected to infer are measured in their ladders: each of them once.
            if folder.rank == 0:
                self.board.note_of_job(otherwise(cluster, settled, self._profiled(dag, cluster), dag.base))
            cluster = settled
            self._measure(bench, groups, cluster)
        if folder.rank == 0:
            probes, profiled = self._probes_of(groups), self._profiled(dag, cluster)
            if described is None:
                self.board.note_of_job(unstorable(cluster, dag))
                self.board.note_of_job(alike_at_last(groups, probes, profiled, dag.base))
            # Of groups that are alike the profiles may say either.
            if described is not None or (roles_said(groups, request.wishes) and not all_alike(groups, probes)):
                self.board.note_of_job(contradiction(cluster, profiled, dag.base))
        self._plan(bench, groups, cluster, "person" if described else "prepare")
        self._compile(bench, own)
        return cluster

    def _check_asked(self) -> None:
        """What is asked of plans goes together; said before anything is measured for them.

        Raises:
            PlanError: naming what does not.
        """
        from qsync_planner.allocator import Request

        Request(**self.request.asked.said)

    def _profiled(self, dag: PrecisionDag, cluster: Cluster | Sequence[Group]) -> dict[str, int]:
        """Read a step in the base precision, in nanoseconds, of each group that has a profile of this job; for rank 0."""
        found = {}
        for group in cluster.groups if isinstance(cluster, Cluster) else cluster:
            profile = self.folder.load(f"profile {group.name}", Profile, dag)
            if profile is not None:
                found[group.name] = profile.steps[0].iteration_ns
        return found

    def _trace(self, job: Job) -> PrecisionDag:
        """The part ``graph``: rank 0 traces; the others see that theirs is the same model, and before they measure the same job."""
        folder, made = self.folder, {}
        dag: PrecisionDag | None = None
        with folder.together(slow=True):
            if folder.rank == 0:
                self.board.stage("tracing")(0, 1, "")
                dag = trace(job)
                self.board.stage("tracing")(1, 1, "")
        told = folder.told({"graph": digest(dag) if dag else ""})[0]["graph"]
        if dag is not None and not folder.is_kept(GRAPH, {GRAPH: told}):
            if why := folder.why_anew(GRAPH, {GRAPH: told}):
                self.board.note(why)
            made = {GRAPH: Made({GRAPH: told}, to_bytes(dag))}
        folder.publish(made)
        with folder.together(slow=True) as facts:
            if dag is None:
                dag = from_bytes(folder.read("graph"), PrecisionDag, name=str(folder.run.dag))
                if digest(dag) != told:  # a network file system that shows what was there before
                    dag = trace(job)
                check_same_model(job, dag, SAME_ON_ALL_RANKS)
            facts["graph"] = digest(dag)[:16]
        return dag

    def _described(self) -> Cluster | None:
        """The cluster that a person has described: with ``--cluster``, or in the run folder; None where there is none.

        Raises:
            ClusterError: on every rank, when it is wrong, or two disks have different ones, or options say the same things.
        """
        run, text, state = self.folder.run, "", ""
        with self.folder.together(), suppress(OSError, UnicodeDecodeError):
            if self.folder.rank == 0 and self.request.cluster is not None:
                text, state = self.request.cluster, "given"
            elif self.folder.writes and is_changed(
                found := read_whole(run.cluster, MAX_FILE_BYTES, "cluster files").decode("utf-8")
            ):
                text, state = found, "known" if CLUSTER in self._on_disk else "changed"
        told = self.folder.told({"cluster": text, "state": state})
        for wanted in ("given", "changed", "known"):
            texts = {rank: said["cluster"] for rank, said in told.items() if said["state"] == wanted}
            if len(set(texts.values())) > 1:
                ranks = ", ".join(map(str, texts))
                raise ClusterError(
                    f"{run.cluster.name} was changed on the disks of ranks {ranks}, differently; make them equal, or keep one"
                )
            if texts:
                if self.request.wishes:
                    raise ClusterError(
                        f"--group and {run.cluster} both describe the groups, because that file was changed by hand or given with "
                        "--cluster: write into it what --group says, or remove it"
                    )
                self._text = next(iter(texts.values()))
                return parse_cluster(self._text, str(run.cluster))
        return None

    def _communicate(self, bench: Bench, groups: Sequence[Group], own: Group) -> None:
        """The parts ``communication GROUPS`` of the whole job, and of each group alone."""
        for some in [tuple(groups), *((group,) for group in groups if len(groups) > 1)]:
            ranks = sorted(rank for group in some for rank in group.ranks)
            name, inputs = f"communication {key_of(group.name for group in some)}", collective_inputs(bench.dag, some)
            if len(ranks) < 2 or self.folder.is_kept(name, inputs):
                continue
            if self.folder.rank == 0 and (why := self.folder.why_anew(name, inputs)):
                self.board.note(why)
            made: dict[str, Made] = {}

            def measure(among: ProcessGroups | None = None) -> CollectiveCosts:
                return measure_communication(
                    bench.job,
                    bench.dag,
                    group=own.name,
                    device=bench.device,
                    share=self.request.share,
                    among=among,
                    progress=self.board.stage("all-reduces"),
                    note=lambda text: self.board.note(text) if self.folder.rank == ranks[0] else None,  # noqa: B023
                )

            if len(ranks) == dist.get_world_size():  # which speak to each other all the time
                costs: CollectiveCosts | None = measure()
            else:
                with ProcessGroups.of(ranks) as among, self.folder.together(slow=True):
                    costs = measure(among) if self.folder.rank in ranks else None
            if costs is not None and self.folder.rank == ranks[0]:
                made[name] = Made(inputs, to_bytes(costs))
            self.folder.publish(made)

    def _agree_on_cluster(self, bench: Bench, groups: Sequence[Group], described: Cluster | None) -> Cluster:
        """What the part ``cluster`` is to be; every rank gets what rank 0 says."""
        if described is None:
            probes = self._probes(bench, groups)
            text = ""
            if self.folder.rank == 0:
                wishes = short_of_memory(groups, probes, self.request.wishes, bench.dag)
                formed = described_groups(groups, probes, wishes, self._profiled(bench.dag, groups))
                formed = with_storages(formed, bench.dag)
                links = with_links(formed, *self._hop(bench.dag, groups)) if len(groups) > 1 else ()
                text = cluster_text(bench.dag.model, formed, links)
            self._text = self.folder.told({"cluster": text})[0]["cluster"]
        return parse_cluster(self._text, str(self.folder.run.cluster))

    def _write_cluster(self, by: str) -> None:
        """The part ``cluster``, once there are plans for it: a cluster that is refused leaves the file that the plans are for."""
        made = Made({"by": by}, self._text.encode())
        lacking = self.folder.writes and self._on_disk.get(CLUSTER) != made.part(CLUSTER)
        needed = any(said["lacking"] == "True" for said in self.folder.told({"lacking": str(lacking)}).values())
        self.folder.publish({CLUSTER: made} if needed and self.folder.rank == 0 else {})
        self._on_disk = {**self._on_disk, CLUSTER: made.part(CLUSTER)}

    def _probes(self, bench: Bench, groups: Sequence[Group]) -> dict[str, Probe]:
        """The parts ``probe GROUP``; none where one group is all there is, which trains, unless its memory may be short."""
        if len(groups) == 1 and not self.request.wishes and not frozen_fills(bench.dag, memory_of(groups[0], {})):
            return {}
        self._in_waves(groups, bench.probe)
        self._in_waves(to_repeat(groups, self._probes_of(groups)), bench.probe_again)
        return self._probes_of(groups)

    def _in_waves(self, groups: Sequence[Group], measure: Callable[[Group], dict[str, Made]]) -> None:
        """Let the first rank of each group measure a part, those that share cores one after the other."""
        for wave in waves(groups):
            made: dict[str, Made] = {}
            with self.folder.together(slow=True):
                for group in wave:
                    if group.first.rank == self.folder.rank:
                        made = measure(group)
            self.folder.publish(made)

    def _probes_of(self, groups: Sequence[Group]) -> dict[str, Probe]:
        """What the folder has of them."""
        found = {}
        for group in groups:
            first, again = (self.folder.parts.get(f"{kind} {group.name}") for kind in ("probe", "reprobe"))
            if first is None:
                continue
            probe = found[group.name] = Probe.of(first.value)
            if again is not None and again.inputs == first.inputs:
                later = Probe.of(again.value)
                found[group.name] = attrs.evolve(probe, again_ns=later.step_ns, again_spread_ns=later.spread_ns)
        return found

    def _hop(self, dag: PrecisionDag, groups: Sequence[Group]) -> tuple[float, float]:
        """Latency and inverse bandwidth of the joint job's hops, in nanoseconds and nanoseconds per byte."""
        from qsync_planner.replayer.communication import hop_of

        costs = self.folder.load(f"communication {key_of(group.name for group in groups)}", CollectiveCosts, dag)
        assert costs is not None  # it is measured first
        model = costs.measured[0].all_reduce
        if model.beta_ns_per_byte <= 0:  # small buckets on a busy machine: the largest says what it can
            nbytes, duration_ns = model.measured[-1]
            model = attrs.evolve(model, alpha_ns=0.0, beta_ns_per_byte=duration_ns / nbytes)
        hop = hop_of(model)
        assert hop is not None  # it was measured among several ranks
        return hop.alpha_ns, hop.beta_ns_per_byte

    def _measure(self, bench: Bench, groups: Sequence[Group], cluster: Cluster) -> None:
        """The parts ``tuning GROUP``, ``profile GROUP`` and ``observations``."""
        observer = next((group for group in groups if cluster.group(group.name).role is Role.TRAIN), groups[0])
        variants = _observed_rungs(cluster)
        in_turn = waves(groups)
        for wave in in_turn:
            made: dict[str, Made] = {}
            with self.folder.together(slow=True):
                for group in wave:
                    if group.first.rank != self.folder.rank:
                        continue
                    entry = cluster.group(group.name)
                    made = {**bench.tune(entry), **bench.profile(entry)}
                    if group is observer:
                        made |= bench.observe(variants)
                    if made and len(in_turn) > 1 and wave is in_turn[0]:
                        names = ", ".join(group.name for wave in in_turn for group in wave)
                        self.board.note(f"groups {names} share cores of {bench.me.host}, so they are measured one after the other")
            self.folder.publish(made)
            bench.forget_partials(made)

    def _plan(self, bench: Bench, groups: Sequence[Group], cluster: Cluster, by: str) -> None:
        """What rank 0 makes of the measurements, while the others wait.

        What a step of other samples takes is known when it is measured: where the best way has uneven batches, they are, and plans
        are made anew.
        """
        planning = self._planning(bench.dag, cluster) if self.folder.rank == 0 else None
        tried: set[tuple[str, int]] = set()
        for rounds_left in reversed(range(1 + BATCH_ROUNDS)):
            self._make(planning.steps(_observed_rungs(cluster)) if planning else [nothing] * STEPS)
            self._write_cluster(by)
            with self.folder.together(slow=True):
                # None after the last plans: what is measured goes into plans.
                wanted = json.dumps(planning.batches_to_measure() if rounds_left else {}) if planning else ""
            batches = json.loads(self.folder.told({"batches": wanted})[0]["batches"])
            if tried.issuperset(batches.items()):
                break
            tried.update(batches.items())
            uneven = [group for group in groups if group.name in batches]
            self._in_waves(uneven, lambda group: bench.profile_at(cluster.group(group.name), batches[group.name]))  # noqa: B023
        self._make(planning.last_steps() if planning else [nothing] * LAST_STEPS)

    def _planning(self, dag: PrecisionDag, cluster: Cluster) -> Planning:
        from qsync_torch.prepare.planning import Planning

        start = partial(self._start_text, cluster)
        return Planning(self.folder, dag, cluster, self.board, self.request.asked, start, self._communication)

    def _make(self, steps: Sequence[Step]) -> None:
        for step in steps:
            with self.folder.together(slow=True):
                made, removed = step()
            self.folder.publish(made, removed)

    def _compile(self, bench: Bench, own: Group) -> None:
        """Let one rank of each machine compile what it will train with: kernels were measured by one rank of a group."""
        first = next(member.rank for member in own.members if member.host == bench.me.host)
        with self.folder.together(slow=True):
            if bench.me.rank == first:
                bench.compile(own)

    def under_base(self, cluster: Cluster) -> Cluster:
        """The cluster with the ladders that a job of this base has."""
        groups = (attrs.evolve(group, ladder=ladder_under(self._base, group.ladder)[0]) for group in cluster.groups)
        return attrs.evolve(cluster, groups=tuple(groups))

    def planned(self, cluster: Cluster) -> tuple[PlannedGroups, ...]:
        """What the folder has for every set of groups."""
        from qsync_torch.prepare.planning import survivors

        found = []
        for names in survivors(cluster):
            part = self.folder.parts[f"plan {key_of(names)}"]
            plan = self.folder.run.load_plan(names) if part.file else None
            found.append(PlannedGroups(names, plan, part.value))
        return tuple(found)

    def start(self, cluster: Cluster) -> Start | None:
        """How training is started, once there are plans."""
        request, run = self.request, self.folder.run
        script = (request.job, *request.arguments) if is_script(request.job) else ("YOUR_SCRIPT.py",)
        whole = run.load_plan([group.name for group in cluster.groups])
        return how_to_start(run, whole, self._groups, script, torchrun=self.folder.members is not None, caller=self._caller)

    def _start_text(self, cluster: Cluster) -> str:
        start = self.start(cluster)
        if start is None:
            return ""
        return "".join(f"{sentence}\n" for sentence in start.sentences(self.folder.run.path))


def nothing() -> tuple[Mapping[str, Made], Sequence[str]]:
    """The step of a rank that has none."""
    return {}, ()


def _observed_rungs(cluster: Cluster) -> tuple[Variant, ...]:
    """What any chip's ladder has whatever the job, and what the groups' have besides."""
    own = (rung for group in cluster.groups for rung in group.ladder)
    return tuple(dict.fromkeys((*any_chips_ladder(), *own)))
