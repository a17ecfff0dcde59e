"""``profile``: what a model costs on one device type, each distinct cost measured once.

See docs/design/cost-mapper.md#profiled-costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import attrs
import torch

from qsync_core.artifacts.files import digest
from qsync_core.errors import JobError
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import (
    AlternatingDispatch,
    ChainCost,
    Compiled,
    Compiler,
    DeviceKind,
    DeviceMemory,
    DeviceType,
    KernelCheck,
    MixedStep,
    OpCost,
    Profile,
    RungMemory,
    StepMeasurement,
    WrongKernels,
)
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes
from qsync_core.progress import ProgressCallback, silent
from qsync_core.settings import CHECKED_ON
from qsync_torch.devices import device_type, gpu_and_sms, memory_format, parse_device, software_versions
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.distributed.ranks import together
from qsync_torch.job import Job, check_same_model, describe_optimizer, waits_of_loop
from qsync_torch.kernels.canary import Canary
from qsync_torch.kernels.installed import open_store
from qsync_torch.kernels.rehearsal import rehearse
from qsync_torch.kernels.selection import AUTO, DEFAULT_BACKEND, compilers_awaited, default_backend
from qsync_torch.profiling.bench import AUTOCAST, Bench, Efforts
from qsync_torch.profiling.cast_cost import possible_casts
from qsync_torch.profiling.chain_cost import distinct_chains
from qsync_torch.profiling.collective import measure_collective
from qsync_torch.profiling.handing_on import handed_on
from qsync_torch.profiling.items import FLOAT32, Item, RightKernels, distinct_items, layer_kinds, refuse_wrong_base, right_kernels
from qsync_torch.profiling.memory import outside_bytes
from qsync_torch.profiling.resume_store import ResumeStore
from qsync_torch.profiling.whole_step import StepRunner, lowered_steps, may_bind, measure_alternating
from qsync_torch.replaying import extension
from qsync_torch.timing import make_stopwatch
from qsync_torch.tracing.held_state import held_state
from qsync_torch.tracing.running_loss import is_run_loss
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.chooser import KernelChooser
from qsync_torch.tuning.compiling import build_all

_MUCH_RESERVED = 1.1
_KINDS, _COMPILE_S = 3, 300
"""Kinds of layers whose compiled step is measured with them alone lowered, as long as compilers took no more than these seconds."""
Note = Callable[[str], None]


@attrs.frozen
class ProfileRequest:
    """What is measured, and how.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        share: share of the device that the job gets; recorded, and part of what a plan matches.
        memory_cap_bytes: memory that the job may use, 0 for all; recorded likewise.
        ladder: variants a plan may use; the job's base (float32 without AMP) is always measured as well, and what is above it not.
        backend: kernels of the adjustable operators; ``a+b`` means a, and b for what a does not offer; ``auto`` whatever ``qsync
            tune`` found fastest for each.  By default ``auto`` on a GPU and ``aten`` on a CPU.
        tuning: file of tuning records; :func:`qsync_core.tuning.store.default_store_path` by default.
        with_collectives: measure all-reduces; without, ranks need not finish at the same time.
        with_chains: measure fused chains too, in every way that some backend runs, so that plans may fuse them; training is then by
            ``qsync_torch.compile`` (docs/design/fused-chains.md).  Each takes as long as a kind of cast at one size.
        efforts: how long each is timed.

    Raises:
        QSyncError: when the device is not there.
    """

    device: torch.device = attrs.field(default=torch.device("cpu"), converter=parse_device)
    share: float = 1.0
    memory_cap_bytes: int = 0
    ladder: Sequence[Variant] = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), FLOAT32)
    backend: str | None = None
    tuning: Path | None = None
    with_collectives: bool = True
    with_chains: bool = False
    efforts: Efforts = attrs.field(factory=Efforts)


@compilers_awaited()
def profile(
    job: Job,
    dag: PrecisionDag,
    asked: ProfileRequest | None = None,
    *,
    resume: Path | None = None,
    progress: ProgressCallback = silent,
    note: Note = lambda text: None,
) -> Profile:
    """Measure a job's operators, casts, buckets and whole steps on one device.

    Measure under the load that training will have: several ranks that share a machine profile at the same time.  In an initialised
    process group of two or more ranks, whole steps are measured under DistributedDataParallel (each rank's alone), and all-reduces
    of the model's gradient buckets are measured too, so all ranks must call this.

    The process's settings (TF32, ``cudnn.benchmark`` and whatever else :mod:`qsync_core.settings` lists) are left as they are and
    recorded: set them where the job is made, as training has them.

    Args:
        job: what is trained; its model is copied to the device and not changed.  Where its script compiles it, whole steps are
            measured so (docs/design/cost-mapper.md#compiled-steps); with chains by ``torch.compile``, which fuses none of them.
        dag: its graph (``trace(job)``).
        asked: what is measured; by default on a CPU.
        resume: file in which finished measurements are kept, so that a killed run continues; the caller removes it.  One of
            another job, optimizer, loss, ladder, device, version or setting is not continued, and a note says what differs.
        note: receives sentences that a reader of the profile should know.

    Raises:
        QSyncError: when the graph is of another model, a kernel cannot run, or, with all-reduces, when that is so on another rank.
    """
    asked = asked or ProfileRequest()
    target = asked.device
    check_same_model(job, dag)
    chooser = chooser_of(target, asked.backend, asked.tuning)
    variants = _variants(job, dag, asked, note)
    type_ = device_type(target, asked.share, asked.memory_cap_bytes)
    compiled = job.compiles
    if compiled is not None and asked.with_chains:
        compiled = attrs.evolve(compiled, by=Compiler.TORCH)
    software = {**software_versions(target), "memory_format": memory_format(job.model)}
    dag_digest = digest(dag)
    right, checked = _right_kernels(dag, variants, chooser, type_, target, progress, note)
    choices = right.choices
    complete = _complete(dag, choices, variants)
    chosen = {
        item: chooser.for_chain(item.requests(target)) for item in (distinct_chains(dag, variants) if asked.with_chains else ())
    }
    fused = {item: choice for item, choice in chosen.items() if choice is not None}
    store = ResumeStore(
        resume,
        {
            **software,
            "graph": dag_digest,
            "device": str(attrs.asdict(type_)),
            "job": job.name,
            "optimizer": describe_optimizer(job),
            "ladder": " ".join(map(str, variants)),
            **({} if compiled is None else {"compiled": str(compiled)}),
            **waits_of_loop(job, target),
            "backend": "+".join(chooser.chain),
            "kernels": _kernels(choices),
            "number of ranks": str(rank_count()),
            "effort": str(asked.efforts),
            **({} if extension.loaded() is None else {"calls": "replayed"}),
        },
    )
    if len(store) and digest(trace(job)) != dag_digest:
        # A graph that was traced before does not say that the loss or the model changed since.
        store.discard("the job's model or loss is no longer the one that was traced")
    if store.discarded:
        note(f"{resume} is of an interrupted profile that cannot be continued: {store.discarded}; everything is measured again")
    if chooser.chain == AUTO and chooser.untuned:
        note(
            f"{len(chooser.untuned)} kernels were never tuned here and take a default; raise --tune, or run 'qsync tune' first, to "
            "find the fastest"
        )
    if type_.kind is DeviceKind.CUDA and (advice := layout_advice(dag, variants)):
        note(advice)
    bench = Bench(dag, dict(job.model.named_parameters()), chooser, make_stopwatch(target), store, asked.efforts, note)
    held = {operator.weight_format for operator in dag.adjustable} | {operator.result_format for operator in dag.operators}
    cast_sites = possible_casts(variants, sorted(held))
    total = len(choices) + len(cast_sites) + len(fused) + sum(map(is_run_loss, dag.operators)) + len(complete) + 1
    counted = _Counted(progress, total)
    build_all(chooser.to_compile, partial(_tell_compiled, progress, total))
    tell = partial(progress, 0, total, "compiling: kernels that are measured")
    rehearse(bench.first_calls(choices, cast_sites, fused), target, tell)
    with ExitStack() as ending:
        if asked.with_collectives:  # which start when all ranks are ready: none waits in one for a rank that failed
            ending.enter_context(together("profile", {"graph": dag_digest[:16]}, slow=True))
        ending.callback(store.flush)
        ending.enter_context(held_state(job.loss))
        costs, index = _operators(bench, choices, counted)
        casts = []
        for key, sites in cast_sites.items():
            counted(f"casts: {key.source}→{key.target}")
            casts.append(bench.cast(key, sites))
        chains = []
        for chain, choice in fused.items():
            counted(f"chains: {chain.chain.producer}")
            chains.append(ChainCost(chain.holders, chain.run.form, chain.run.variant, bench.chain(chain, choice)))
        runner = _runner(job, target, compiled, complete, note)
        for operator in filter(is_run_loss, dag.operators):
            counted("loss")
            index[operator.op_id] = {FLOAT32: len(costs)}
            costs.append(bench.loss(operator, runner))
        bench.watch_autocast(runner.model)
        if compiled is not None and runner.compiled is None:
            note("ranks communicate in the model's forward, where one is compiled with the others only: whole steps are eager ones")
        if runner.compiled is not None and runner.apart is None:
            runner.forward(0)  # no compiler is to read who watches
        steps = _steps(bench, runner, complete, choices, counted)
        whole = runner.compiled is not None and runner.apart is None
        mixed = _kinds_alone(bench, runner, complete, choices, counted, steps[0], costs, index) if whole else []
        if runner.compile_s:
            count = len(steps) + len(mixed)
            said = "1 whole step was" if count == 1 else f"{count} whole steps were"
            note(f"{said} compiled by {compiled}, which took {runner.compile_s:.0f} s")
        counted.stay("alternating steps")
        alternating = _alternating(bench, runner, complete, choices, steps)
        counted.stay("what is handed on")
        with nullcontext() if runner.apart is None else lowered_steps(runner, dag.index, steps[0].variant, dag, {}):
            if not runner.optimizer.state:
                runner.train_step(0)
            # A graph is traced on a CPU.
            handing_on = () if target.type == "cpu" else handed_on(runner.model, dag, lambda: runner.forward(0))
            synchronises = runner.watch_synchronising(target)
        state_bytes, input_bytes = runner.optimizer_state_bytes, runner.batches[0].nbytes
        counted("all-reduce")
    collective = measure_collective([bucket.nbytes for bucket in dag.buckets], target) if asked.with_collectives else None
    memory = None
    if target.type == "cuda":
        rungs = (store.read(f"memory {variant}", RungMemory) for variant in complete)
        memory = DeviceMemory(outside_bytes(target), tuple(rung for rung in rungs if rung is not None))
        _note_fragmentation(memory, software, asked.memory_cap_bytes, note)
    progress(total, total, "")
    return Profile(
        device=type_,
        software={
            **{name: value for name, value in {**software, CHECKED_ON: gpu_and_sms(target)}.items() if value},
            "autocast": store.read(AUTOCAST, str) or software["autocast"],
            **chooser.versions((*choices.values(), *fused.values())),
        },
        model=dag.model,
        dag_digest=dag_digest,
        costs=tuple(costs),
        cost_index=index,
        casts=tuple(casts),
        optimizer_dispatch_ns=steps[0].optimizer_dispatch_ns,
        optimizer_compute_ns=steps[0].optimizer_compute_ns,
        optimizer_state_bytes=state_bytes,
        input_bytes=input_bytes,
        collective=collective,
        steps=tuple(steps),
        synchronises=synchronises,
        memory=memory,
        chains=tuple(chains),
        handed_on=tuple(op_id for op_id in handing_on if op_id in index),
        alternating=alternating,
        check=KernelCheck(checked, right.wrong),
        compiled=runner.compiled,
        mixed=tuple(mixed),
    )


@attrs.define
class _Counted:
    """Tells how far a profile is, one thing that is measured after the other."""

    progress: ProgressCallback
    total: int
    done: int = 0

    def __call__(self, what: str) -> None:
        self.stay(what)
        self.done += 1

    def stay(self, what: str) -> None:
        """Say what is measured beside what is counted."""
        self.progress(self.done, self.total, what)


def _tell_compiled(progress: ProgressCallback, total: int, built: int, every: int) -> None:
    progress(0, total or every, f"compiling: {built} of {every} kernels")


def _variants(job: Job, dag: PrecisionDag, asked: ProfileRequest, note: Note) -> tuple[Variant, ...]:
    """The rungs that are measured, each once, and the base."""
    kept, cut = ladder_under(dag.base, asked.ladder)
    variants = tuple(dict.fromkeys((*kept, Variant.plain(dag.base))))
    if cut:
        how = "trains under autocast" if dag.autocast else "holds its weights"
        note(f"{', '.join(rung.label for rung in cut)} is not measured: {job.name} {how} in {dag.base}")
    eight = [variant for variant in variants if variant.compute.needs_scale]
    if floats := [operator for operator in dag.adjustable if eight and not any(map(operator.runs_in, eight))]:
        note(f"{len(floats)} operators ({floats[0].op_id} and so on) have no kernels in 8 bit, and are measured in float formats")
    return variants


def _right_kernels(
    dag: PrecisionDag,
    variants: Sequence[Variant],
    chooser: KernelChooser,
    type_: DeviceType,
    device: torch.device,
    progress: ProgressCallback,
    note: Note,
) -> tuple[RightKernels, int]:
    """Compile and check what operators may run on.

    Returns:
        The kernels that are left, and how many were checked.

    Raises:
        QSyncError: where the job's own, without a plan, are wrong.
    """
    items = distinct_items(dag, variants, type_.kind)
    chosen: list[tuple[CallShapes, Variant, KernelChoice]] = []
    for operator, variant in ((item.operator, item.variant) for item in items if item.operator.is_adjustable):
        # Those that are compiled are, all at once, before the first of them runs.
        call = CallShapes.of(operator)
        chosen.append((call, variant, chooser.for_operator(call, variant, f"operator {operator.op_id}")))
    build_all(chooser.to_compile, partial(_tell_compiled, progress, 0))
    if any(variant.compute.needs_scale or variant.storage.is_quantized for variant in variants):
        if device.type == "cuda":
            progress(0, 1, "compiler of replays")
        extension.want(device, wait=True)
    canary = Canary(device)
    canary.rehearse(chosen, partial(progress, 0, 1, "compiling: kernels that are checked"))
    progress(0, 1, "canary")
    right = right_kernels(items, dag, chooser, canary)
    refuse_wrong_base(right, items, dag.base, type_.share, type_.name)
    for left_out in right.wrong:
        note(left_out_sentence(left_out, type_.name))
    return right, canary.checked


def _operators(
    bench: Bench, choices: Mapping[Item, KernelChoice], counted: _Counted
) -> tuple[list[OpCost], dict[OpId, dict[Variant, int]]]:
    """The distinct costs, and which of them is whose in which variant."""
    costs: list[OpCost] = []
    index: dict[OpId, dict[Variant, int]] = {}
    for item, choice in choices.items():
        counted(f"operators: {item.operator.kind} {item.variant.label}")
        cost = bench.operator(item, choice)
        if cost is None:
            continue
        for op_id in item.holders:
            index.setdefault(op_id, {})[item.variant] = len(costs)
        costs.append(cost)
    return costs, index


def _of_variant(choices: Mapping[Item, KernelChoice], variant: Variant) -> dict[OpId, KernelChoice]:
    return {op_id: choice for item, choice in choices.items() if item.variant == variant for op_id in item.holders}


def _runner(job: Job, device: torch.device, compiled: Compiled | None, complete: Iterable[Variant], note: Note) -> StepRunner:
    """The copy of the model that steps are measured of; one that does not fit on its device waits for its weights to be stored."""
    try:
        return StepRunner.start(job, device, compiled=compiled)
    except torch.OutOfMemoryError:
        if not any(variant.storage.is_quantized for variant in complete):
            raise
    note(
        f"{job.name} does not fit on this device as its script has it: whole steps are measured with frozen weights stored "
        "otherwise alone, and those of other plans follow from the sum of their operators"
    )
    return StepRunner.start(job, device, compiled=compiled, apart=True)


def _steps(
    bench: Bench, runner: StepRunner, complete: Sequence[Variant], choices: Mapping[Item, KernelChoice], counted: _Counted
) -> list[StepMeasurement]:
    """Whole steps in each variant, the base's first; where weights may be stored otherwise, those alone that fit.

    Raises:
        JobError: when none does.
    """
    steps: list[StepMeasurement] = []
    stores = any(variant.storage.is_quantized for variant in complete)
    for variant in sorted(complete, key=lambda v: v != Variant.plain(bench.dag.base)):
        counted(f"whole step {variant.label}{'' if runner.compiled is None else ', compiled'}")
        if runner.apart is not None and not variant.storage.is_quantized:
            continue
        first, chosen = steps[0] if steps else None, _of_variant(choices, variant)
        try:
            steps.append(bench.step(runner, variant, chosen, first, may_not_fit=stores))
        except torch.OutOfMemoryError:
            runner.optimizer.zero_grad(set_to_none=True)
            bench.note(f"a whole step in {variant.label} does not fit on this device, and is not measured")
    if not steps:
        raise JobError(
            f"no training step of {runner.job.name} fits on this device, whichever of {', '.join(v.label for v in complete)} its "
            "weights are stored in: take a smaller batch, checkpoint activations, or leave this device out"
        )
    if runner.communicates:
        bench.note(
            "ranks communicate in the model's forward: it is measured as if all others did as this rank does, so that step "
            "times leave these transfers out"
        )
    return steps


def _kinds_alone(
    bench: Bench,
    runner: StepRunner,
    complete: Sequence[Variant],
    choices: Mapping[Item, KernelChoice],
    counted: _Counted,
    base: StepMeasurement,
    costs: Sequence[OpCost],
    index: Mapping[OpId, Mapping[Variant, int]],
) -> list[MixedStep]:
    """Compiled steps with the kinds of layers that take longest, each alone, in the lowest variant."""

    def base_ns(operator: Operator) -> int:
        cost = costs[index[operator.op_id][base.variant]]
        return cost.forward_compute_ns + cost.backward_compute_ns

    rung = next((variant for variant in complete if variant != base.variant), None)
    kinds = [] if rung is None else [kind for kind in layer_kinds(bench.dag, base_ns) if bench.dag[kind[0]].runs_in(rung)]
    if rung is None or len(kinds) < 2:
        return []
    found: list[MixedStep] = []
    for kind in kinds[:_KINDS]:
        if runner.compile_s > _COMPILE_S:
            bench.note(f"no more than {len(found)} kinds of layers are measured alone in {rung.label}: compiling takes long")
            break
        counted.stay(f"whole step {rung.label} of {kind[0].fqn} and its like, compiled")
        found.append(MixedStep(kind, bench.step(runner, rung, _of_variant(choices, rung), base, kind)))
    return found


def _alternating(
    bench: Bench,
    runner: StepRunner,
    complete: Sequence[Variant],
    choices: Mapping[Item, KernelChoice],
    steps: Sequence[StepMeasurement],
) -> AlternatingDispatch | None:
    """Steps with every other operator lowered, where the CPU may bind them; no call goes through a plan in compiled graphs."""
    base = Variant.plain(bench.dag.base)
    rung = next((v for v in complete if v != base and not v.compute.needs_scale), complete[0])
    of_rung = next((step for step in steps if step.variant == rung), None)
    if runner.apart is not None or steps[0].variant != base or of_rung is None:
        return None
    mixes = bench.stopwatch.device.type == "cuda" and rung != base and len(bench.dag.adjustable) > 1
    if not mixes or runner.compiled is not None or not may_bind(steps[0], of_rung):
        return None
    try:
        return measure_alternating(runner, rung, bench.dag, bench.stopwatch, _of_variant(choices, rung))
    except torch.OutOfMemoryError:  # a mixed step may need more than any rung's
        bench.note("steps with every other operator lowered do not fit: mixed plans may take the CPU longer than predicted")
        return None


def _complete(dag: PrecisionDag, items: Iterable[Item], variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants in which operators run, and every one that does has right kernels: whole steps are measured in these, with the
    others at the base.
    """
    held: dict[Variant, set[OpId]] = {}
    for item in items:
        held.setdefault(item.variant, set()).update(item.holders)

    def lowered(variant: Variant) -> set[OpId]:
        return {operator.op_id for operator in dag.adjustable if operator.runs_in(variant)}

    return tuple(
        variant
        for variant in variants
        if lowered(variant) <= held.get(variant, set()) and (lowered(variant) or variant == Variant.plain(dag.base))
    )


def left_out_sentence(wrong: WrongKernels, device: str) -> str:
    """What a reader of a profile should know of a kernel that is wrong."""
    more = f" and {len(wrong.operators) - 1} more" if len(wrong.operators) > 1 else ""
    return (
        f"{wrong.kernel} in {wrong.variant.label} is left out for operator {wrong.operators[0]}{more}: on this {device} "
        f"{wrong.problem} (docs/shared-gpus.md#canary)"
    )


def layout_advice(dag: PrecisionDag, variants: Sequence[Variant]) -> str:
    """What to change where convolutions copy their images for the kernels of tensor cores; empty where none does."""
    convolutions = [operator for operator in dag.adjustable if operator.is_convolution and len(operator.output_shape) == 4]
    # An image of one channel or of one pixel is both at once.
    copied = sum(
        operator.attributes.get("memory_format") != "channels_last" and 1 not in (x[1], x[2] * x[3])
        for operator in convolutions
        for x in operator.input_shapes[:1]
    )
    if not copied or all(variant.compute is Precision.FLOAT32 for variant in variants):
        return ""
    return (
        f"{copied} of {len(convolutions)} convolutions read images that are not channels-last, and kernels for tensor cores copy "
        "them; bring the job's model and batches to that layout, model.to(memory_format=torch.channels_last) and "
        "images.to(memory_format=torch.channels_last), before it is planned and in training (docs/tuning.md#the-layout-of-images)"
    )


def _note_fragmentation(memory: DeviceMemory, software: Mapping[str, str], cap_bytes: int, note: Note) -> None:
    """Say what to do against an allocator that reserves far more than tensors take, or may under a memory budget."""
    worst = max((rung.reserved_bytes / max(1, rung.allocated_bytes) for rung in memory.rungs), default=1.0)
    if software["expandable_segments"] == "False" and (cap_bytes or worst > _MUCH_RESERVED):
        note(
            f"PyTorch's allocator reserves up to {worst:.2f} times what tensors take, and other plans may need more; where memory "
            "is limited, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True while the job is profiled and in training"
        )


def chooser_of(device: torch.device, backend: str | None, tuning: Path | None) -> KernelChooser:
    """Who chooses kernels: with the records of this machine, unless PyTorch's own are all that is asked for."""
    backend = default_backend(device) if backend is None else backend
    return KernelChooser(device, backend, None if backend == DEFAULT_BACKEND else open_store(device, tuning))


def _kernels(choices: Mapping[Item, KernelChoice]) -> str:
    """A digest of the kernels that were chosen: a search since (``qsync tune``) may have found others."""
    rows = sorted(f"{item.name} {choice.backend} {choice.config}" for item, choice in choices.items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
