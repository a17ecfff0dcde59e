"""What one rank of a group measures for all of it, each a part of the run folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import attrs
import torch

from qsync_core.artifacts.codec import from_plain, to_plain
from qsync_core.artifacts.files import digest, load, save, to_bytes
from qsync_core.errors import ArtifactError, BackendError, JobError, QSyncError
from qsync_core.ir import checks
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.profile import DeviceKind, Profile
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.plugins.registry import Registry
from qsync_torch.devices import standard_ladder
from qsync_torch.distributed.alone import Alone
from qsync_torch.distributed.process_group import backend_without_nccl, rank_count
from qsync_torch.failures import first_line, place_of
from qsync_torch.job import Batch, Job, compare_as_rank, describe_optimizer, waits_of_loop
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.record import JobFault
from qsync_torch.prepare.attention_masks import masks_told
from qsync_torch.prepare.board import Board
from qsync_torch.prepare.folder import Folder, Made
from qsync_torch.prepare.ledger import file_of
from qsync_torch.prepare.participants import Group, Participant
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.items import check_base
from qsync_torch.profiling.paying import CPU_LADDER, Uncertain, compared_rungs, repeated, seconds_of
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.profiling.whole_step import StepRunner, measure_at
from qsync_torch.timing import make_stopwatch
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.job_tuning import TUNING_S, compile_planned, tune_job

Run = Callable[[Mapping[str, str]], Made]
"""Makes a part of its inputs."""
SAME_ON_ALL_RANKS = "give this rank the job of rank 0, which was traced"
"""What to do where a rank has another job."""
COMPARING = "comparing the groups"
"""A stage."""
_FASTER_BELOW = 1.0
"""A CPU's rung is measured where the largest operator may take less than this share of its base time; a plan then weighs it."""
_TOO_LARGE_NS = 2**62
"""The step of a device that has no memory for it."""


@attrs.frozen
class Probe:
    """What is found out of a group before its role is known: its step in the job's base precision, and the rungs that may pay.

    ``spread_ns`` is by how much the step is uncertain to either side.  ``again_ns`` and ``again_spread_ns`` are of another moment,
    which is 0 where there is no need of it.
    """

    step_ns: int = attrs.field(validator=checks.positive_int)
    ladder: tuple[Variant, ...]
    spread_ns: int = attrs.field(default=0, validator=checks.non_negative_int)
    again_ns: int = attrs.field(default=0, validator=checks.non_negative_int)
    again_spread_ns: int = attrs.field(default=0, validator=checks.non_negative_int)

    @property
    def fits(self) -> bool:
        """Whether the device has memory for the step."""
        return self.step_ns < _TOO_LARGE_NS

    @classmethod
    def of(cls, value: str) -> Probe:
        """Read a probe from the value of a part.

        Raises:
            ArtifactError: when it is something else.
        """
        try:
            return from_plain(json.loads(value), cls)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"the ledger holds no comparison of the groups: {error}; start it again with --fresh") from None

    @property
    def value(self) -> str:
        """The probe as text, for the value of a part."""
        return json.dumps(to_plain(self))


@attrs.frozen(eq=False)
class Bench:
    """What a rank measures with.

    Attributes:
        job, dag: what is trained, and its graph; device: where.
        me: what this process has said of itself.
        folder: where finished parts are; board: who is told how far it is.
        chains: whether profiles measure fused chains.
        tune_s: for how long kernels are tuned, in seconds.
    """

    job: Job
    dag: PrecisionDag
    device: torch.device
    me: Participant
    folder: Folder
    board: Board
    chains: bool = False
    tune_s: float = TUNING_S
    _checked: list[bool] = attrs.field(factory=list)

    def check_base(self, group: Group) -> None:
        """Check what the job runs without a plan, unless a profile is kept for which that was done.

        Raises:
            QSyncError: when this device computes wrong numbers.
        """
        known = self.folder.parts.get(f"profile {group.name}")
        if known is None or any(known.inputs.get(name) != value for name, value in self._inputs().items()):
            self.board.stage("checking the job's products")(0, 1, "")
            with suppress(torch.OutOfMemoryError):  # a group whose step is too large is said to be where steps are measured
                check_base(self.dag, self.device, self.me.device.share, self.me.device.name)
            self.board.stage("checking the job's products")(1, 1, "")

    def probe(self, group: Group) -> dict[str, Made]:
        """The part ``probe GROUP``."""
        return self._unless_kept(f"probe {group.name}", self._inputs(), self._probe)

    def probe_again(self, group: Group) -> dict[str, Made]:
        """The part ``reprobe GROUP``: the step at another moment."""

        def run(inputs: Mapping[str, str]) -> Made:
            self.board.stage(COMPARING)(0, 1, "the same steps once more")
            return self._step_made(inputs, ())

        return self._unless_kept(f"reprobe {group.name}", self._inputs(), run)

    def tune(self, group: DeviceGroup) -> dict[str, Made]:
        """The part ``tuning GROUP``: the fastest kernels, on a GPU; their records stay in the tuning file of this machine."""
        if self.device.type != "cuda":
            return {}

        def run(inputs: Mapping[str, str]) -> Made:
            progress = self.board.stage("tuning")
            store = tune_job(self.dag, group.ladder, self.device, seconds=self.tune_s, progress=progress)
            return Made(inputs, value=json.dumps({"records": str(store.path) if store else ""}))

        inputs = self._inputs(ladder=_texts(group.ladder), kernels=_kernels(), seconds=f"{self.tune_s:g}")
        return self._unless_kept(f"tuning {group.name}", inputs, run)

    def profile(self, group: DeviceGroup) -> dict[str, Made]:
        """The part ``profile GROUP``; an interrupted one leaves ``profiles/GROUP.qsync.partial``, and continues."""

        def run(inputs: Mapping[str, str]) -> Made:
            found = profile(
                self.job,
                self.dag,
                ProfileRequest(self.device, group.share, ladder=group.ladder, with_collectives=False, with_chains=self.chains),
                resume=self.folder.run.partial(self.folder.run.profile(group.name)),
                progress=self.board.stage("profiling"),
                note=self.board.note,
            )
            if self.job.compiles and (masks := masks_told(self.dag, self.device, found.steps[0].iteration_ns)):
                self.board.note(masks)
            return Made(inputs, to_bytes(found))

        ladder, known = _texts(group.ladder), self.folder.parts.get(f"profile {group.name}")
        if known is not None and set(ladder.split()) <= set(known.inputs.get("ladder", "").split()):
            ladder = known.inputs["ladder"]  # more was measured
        chains = {"chains": "measured"} if self.chains else {}
        tuned = {"seconds of tuning": f"{self.tune_s:g}"} if self.device.type == "cuda" else {}
        inputs = self._inputs(ladder=ladder, kernels=_kernels(), optimizer=describe_optimizer(self.job), **chains, **tuned)
        return self._unless_kept(f"profile {group.name}", inputs, run)

    def profile_at(self, group: DeviceGroup, batch_size: int) -> dict[str, Made]:
        """The part ``profile GROUP`` with steps at another local batch; nothing where they fail, or memory is short for them."""
        part, profile = self.folder.parts[f"profile {group.name}"], self.folder.load(f"profile {group.name}", Profile, self.dag)
        assert profile is not None  # it is measured first
        self._check_job()  # a kept profile may be all that was needed of this rank
        stage, ladder = self.board.stage("profiling"), ladder_under(self.dag.base, group.ladder)[0]
        stage(0, 1, f"whole steps of {batch_size} samples")
        try:
            found = measure_at(
                self.job, self.dag, profile, ladder, make_stopwatch(self.device), Efforts().steps, batch_size, self.board.note
            )
        except (QSyncError, RuntimeError) as error:
            self.board.note(
                f"a step of {batch_size} samples is not measured ({first_line(error)}): what it takes is taken as proportional to "
                "the samples"
            )
            return {}
        finally:
            stage(1, 1, "")
        batches = sorted((*profile.batches, *found), key=lambda one: one.batch_size)
        return {f"profile {group.name}": Made(part.inputs, to_bytes(attrs.evolve(profile, batches=tuple(batches))))}

    def observe(self, variants: Iterable[Variant]) -> dict[str, Made]:
        """The part ``observations``; an interrupted observation leaves ``job.observations.qsync.partial``, and continues."""
        wanted = tuple(variants)
        partial = self.folder.run.partial(self.folder.run.observations)

        def run(inputs: Mapping[str, str]) -> Made:
            try:
                earlier = load(partial, Observations) if partial.exists() else None
            except QSyncError:
                earlier = None
            found = self._observe(wanted, partial, earlier)
            return Made(inputs, to_bytes(found))

        software = {name: self.me.software[name] for name in ("torch", "qsync-torch")}
        inputs = {"graph": digest(self.dag), **software, "optimizer": describe_optimizer(self.job), "rungs": _texts(wanted)}
        return self._unless_kept("observations", inputs, run)

    def compile(self, group: Group) -> None:
        """Compile on this machine what its ranks of a group train with, under every plan that has them."""
        stage, run = self.board.stage("compiling kernels"), self.folder.run
        if self.device.type != "cuda":
            return
        for names in run.planned_groups():
            if group.name in names and (plan := run.load_plan(names)).dag_digest == digest(self.dag):
                try:
                    compile_planned(self.dag, plan.group(group.name).assignments, self.device, stage)
                except BackendError as error:  # which training would meet
                    self.board.note(str(error))
        stage(1, 1, "")

    def forget_partials(self, made: Iterable[str]) -> None:
        """Remove what was kept for parts that are finished now."""
        for name in made:
            if path := file_of(name, self.folder.run):
                with suppress(OSError):  # it is of no use any more, and does no harm
                    self.folder.run.partial(path).unlink(missing_ok=True)

    def _unless_kept(self, name: str, inputs: Mapping[str, str], run: Run) -> dict[str, Made]:
        if self.folder.is_kept(name, inputs):
            return {}
        if why := self.folder.why_anew(name, inputs):
            self.board.note(why)
        self._check_job()
        return {name: run(inputs)}

    def _check_job(self) -> None:
        """Check, before this rank measures, that it has the job of rank 0, whose graph it has; its batches may have other sizes.

        Raises:
            QSyncError: naming what differs.
        """
        if self.me.rank and not self._checked:
            self.board.stage("tracing")(0, 1, "")
            if differing := compare_as_rank(self.dag, trace(self.job), SAME_ON_ALL_RANKS):
                self.board.note(
                    f"the graph of rank 0 is not quite that of rank {self.me.rank} ({differing}): here operators are measured as "
                    "rank 0 has them, and whole steps on this rank's own batches; where these are padded, pad all to one length "
                    "for predictions that hold for every step"
                )
            self.board.stage("tracing")(1, 1, "")
            self._checked.append(True)

    def _inputs(self, **more: str) -> dict[str, str]:
        """The job's graph, how its script compiles it, whether its loop waits for every step, and what this process is."""
        device, how = self.me.device, {"compiled": str(self.job.compiles)} if self.job.compiles else {}
        how |= waits_of_loop(self.job, self.device)
        return {"graph": digest(self.dag), **how, "device": device.name, "share": f"{device.share:g}", **self.me.software, **more}

    def _probe(self, inputs: Mapping[str, str]) -> Made:
        self.board.stage(COMPARING)(0, 1, "a few steps")
        ladder = standard_ladder(self.device, self.dag)
        if self.device.type == "cpu":
            ratios = compared_rungs(self.dag, dict(self.job.model.named_parameters())) if self.dag.adjustable else {}
            ladder = (*(rung for rung, ratio in ratios.items() if _may_pay(ratio)), CPU_LADDER[-1])
            for rung in (rung for rung in ratios if rung not in ladder):
                share = f"{ratios[rung].value:.2f} ± {ratios[rung].spread:.2f}"
                self.board.note(
                    f"{rung.label} is left off the ladder: the largest operator takes {share} of its {self.dag.base} time in it"
                )
        return self._step_made(inputs, ladder)

    def _step_made(self, inputs: Mapping[str, str], ladder: tuple[Variant, ...]) -> Made:
        step = self._step()
        self.board.stage(COMPARING)(1, 1, "")
        return Made(inputs, value=Probe(round(1e9 * step.value), ladder, round(1e9 * step.spread)).value)

    def _step(self) -> Uncertain:
        """Seconds of a step in the base precision, compiled where the script compiles it.

        Raises:
            JobError: where it fails.
        """

        def step() -> None:
            runner.train_step(next(numbers))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        try:
            numbers, runner = itertools.count(), StepRunner.start(self.job, self.device, batches=2, compiled=self.job.compiles)
            with runner.compiling(None):
                step()
                return repeated(lambda: seconds_of(step))
        except torch.OutOfMemoryError:
            return Uncertain(_TOO_LARGE_NS / 1e9)
        except (QSyncError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if self.job.compiles and rank_count() < 2:
                raise JobError(
                    f"a training step of {self.job.name}, compiled by {self.job.compiles}, fails{place_of(error)} "
                    f"({first_line(error)}); see that it runs without QSync, or where the script does not compile this model, say "
                    "qsync.hybrid(..., compiles=False)"
                ) from error
            raise JobError(
                f"a training step of {self.job.name} on rank {self.me.rank}, which is measured alone, fails{place_of(error)} "
                f"({first_line(error)}); see that it runs without QSync, and where it waits for other ranks, that it asks them by "
                "functions of torch.distributed with tensors, which are answered meanwhile, and by no dist.barrier or object store"
            ) from error

    def _observe(self, variants: tuple[Variant, ...], partial: Path, earlier: Observations | None) -> Observations:
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with Alone() if self.folder.members else nullcontext() as alone:
                return observe(
                    self.job if alone is None else attrs.evolve(self.job, loss=_followed(self.job.loss, alone)),
                    self.dag,
                    ObserveRequest(variants, device=self.device),
                    earlier=earlier,
                    checkpoint=lambda so_far: save(so_far, partial),
                    announce=self.board.note,
                    progress=self.board.stage("observing"),
                )
        except JobFault:
            partial.unlink(missing_ok=True)
            if earlier is None:
                raise
            return self._observe(variants, partial, None)  # the interrupted one was of a job that trained otherwise


def _may_pay(ratio: Uncertain) -> bool:
    """Whether a rung's time may be below the base's: it is left out where it is above it beyond doubt."""
    return ratio.value - ratio.spread < _FASTER_BELOW


def collective_inputs(dag: PrecisionDag, groups: Iterable[Group]) -> dict[str, str]:
    """What collectives among some groups depend on; not on the order of ranks."""
    found = {"graph": digest(dag)}
    for group in groups:
        first, hosts = group.first, len({member.kernel for member in group.members})
        device = f"{len(group.ranks)} × {first.device.name} at {first.device.share:.0%} on {hosts} machines"
        versions = ", ".join(f"{name} {first.software.get(name, '')}" for name in ("torch", "qsync-torch", "cuda", "driver"))
        found[f"group {group.name}"] = f"{device}, {versions}"
        if first.device.kind is DeviceKind.CUDA and (backend := backend_without_nccl()):
            found["backend"] = backend  # as the script has it
    return found


def _followed(loss: Callable[[Any, Batch], torch.Tensor], alone: Alone) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda output, batch: alone.follow(loss(output, batch))


def _texts(variants: Iterable[Variant]) -> str:
    return " ".join(map(str, variants))


def _kernels() -> str:
    """The installed backends' versions."""
    return ", ".join(f"{name} {version}" for name, version in sorted(Registry.load().backend_versions().items()))
