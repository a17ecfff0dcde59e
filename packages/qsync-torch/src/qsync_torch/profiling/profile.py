"""``profile``: what a model costs on one device type, each distinct cost measured once.

See docs/design/cost-mapper.md#profiled-costs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.codec import CodecError, from_plain, to_plain
from qsync_core.artifacts.files import digest
from qsync_core.artifacts.whole_file import read_whole
from qsync_core.errors import ArtifactError, JobError, PlanError, QSyncError
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import (
    CastKey,
    CastModel,
    ChainCost,
    DeviceKind,
    DeviceMemory,
    KernelCheck,
    OpCost,
    Profile,
    RungMemory,
    StepMeasurement,
    WrongKernels,
)
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes
from qsync_core.progress import ProgressCallback, silent
from qsync_core.settings import CHECKED_ON
from qsync_torch.devices import active_autocast, device_type, gpu_and_sms, memory_format, parse_device, software_versions
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.distributed.ranks import together
from qsync_torch.failures import first_line, place_of
from qsync_torch.job import Job, autocast, check_same_model, describe_optimizer
from qsync_torch.kernels.canary import Canary
from qsync_torch.kernels.installed import open_store
from qsync_torch.kernels.selection import AUTO, DEFAULT_BACKEND, default_backend
from qsync_torch.profiling.benchmark_case import loss_case
from qsync_torch.profiling.cast_cost import cast_shapes, measure_cast, possible_casts
from qsync_torch.profiling.chain_cost import ChainItem, chain_case, distinct_chains
from qsync_torch.profiling.collective import measure_collective
from qsync_torch.profiling.device_memory import outside_bytes
from qsync_torch.profiling.handing_on import handed_on
from qsync_torch.profiling.items import FLOAT32, Item, distinct_items, refuse_wrong_base, right_kernels
from qsync_torch.profiling.operator_cost import measure_case, measure_operator
from qsync_torch.profiling.whole_step import StepRunner, may_bind, measure_alternating, measure_step
from qsync_torch.timing import Effort, Stopwatch, make_stopwatch
from qsync_torch.tracing.held_state import held_state
from qsync_torch.tracing.running_loss import is_run_loss
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.chooser import KernelChooser
from qsync_torch.tuning.compiling import build_all

_LONGEST_VALUE = 200
"""Characters of a setting that a sentence shows."""

T = TypeVar("T")
OPERATOR_EFFORT = Effort(min_repeats=5, max_repeats=60, budget_s=0.3)
CAST_EFFORT = Effort(min_repeats=5, max_repeats=30, budget_s=0.05)
STEP_EFFORT = Effort(min_repeats=2, max_repeats=40, target=0.005, budget_s=1.0, warmup=0)
_FORMAT = 4
"""The format of the file of a :class:`ResumeStore`."""
_AUTOCAST = "autocast"
"""Name under which a :class:`ResumeStore` keeps the autocast of the job's forward."""
_MUCH_RESERVED = 1.1
_WRITE_EVERY_S = 0.5
_MAX_BYTES = 256 << 20


def profile(
    job: Job,
    dag: PrecisionDag,
    *,
    device: str | torch.device = "cpu",
    share: float = 1.0,
    memory_cap_bytes: int = 0,
    ladder: Sequence[Variant] = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), FLOAT32),
    backend: str | None = None,
    tuning: Path | None = None,
    resume: Path | None = None,
    with_collectives: bool = True,
    with_chains: bool = False,
    progress: ProgressCallback = silent,
    note: Callable[[str], None] = lambda text: None,
    operator_effort: Effort = OPERATOR_EFFORT,
    cast_effort: Effort = CAST_EFFORT,
    step_effort: Effort = STEP_EFFORT,
) -> Profile:
    """Measure a job's operators, casts, buckets and whole steps on one device.

    Measure under the load that training will have: several ranks that share a machine profile at the same time.  In an initialised
    process group of two or more ranks, whole steps are measured under DistributedDataParallel (each rank's alone), and all-reduces
    of the model's gradient buckets are measured too, so all ranks must call this.

    The process's settings (TF32, ``cudnn.benchmark`` and whatever else :mod:`qsync_core.settings` lists) are left as they are and
    recorded: set them where the job is made, as training has them.

    Args:
        job: what is trained; its model is copied to the device and not changed.
        dag: its graph (``trace(job)``).
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        share: share of the device that the job gets; recorded, and part of what a plan matches.
        memory_cap_bytes: memory that the job may use, 0 for all; recorded likewise.
        ladder: variants a plan may use; the job's base (float32 without AMP) is always measured as well, and what is above it not.
        backend: kernels of the adjustable operators; ``a+b`` means a, and b for what a does not offer; ``auto`` whatever ``qsync
            tune`` found fastest for each.  By default ``auto`` on a GPU and ``aten`` on a CPU.
        tuning: file of tuning records; :func:`qsync_core.tuning.store.default_store_path` by default.
        resume: file in which finished measurements are kept, so that a killed run continues; the caller removes it.  One of
            another job, optimizer, loss, ladder, device, version or setting is not continued, and a note says what differs.
        with_collectives: measure all-reduces; without, ranks need not finish at the same time.
        with_chains: measure fused chains too, in every way that some backend runs, so that plans may fuse them; training is then by
            ``qsync_torch.compile`` (docs/design/fused-chains.md).  Each takes as long as a kind of cast at one size
            (``cast_effort``).
        note: receives sentences that a reader of the profile should know.

    Raises:
        QSyncError: when the device is not there, the graph is of another model, a kernel cannot run, or, with all-reduces, when
            that is so on another rank.
    """
    target = parse_device(str(device))
    check_same_model(job, dag)
    chooser = chooser_of(target, backend, tuning)
    base = Variant.plain(dag.base)
    kept, cut = ladder_under(dag.base, ladder)
    variants = tuple(dict.fromkeys((*kept, base)))
    if cut:
        how = "trains under autocast" if dag.autocast else "holds its weights"
        note(f"{', '.join(rung.label for rung in cut)} is not measured: {job.name} {how} in {dag.base}")
    type_ = device_type(target, share, memory_cap_bytes)
    software = {**software_versions(target), "memory_format": memory_format(job.model)}
    dag_digest = digest(dag)
    items = distinct_items(dag, variants, type_.kind)
    if floats := [operator for operator in dag.adjustable if not all(map(operator.runs_in, variants))]:
        note(f"{len(floats)} operators ({floats[0].op_id} and so on) have no kernels in 8 bit, and are measured in float formats")
    for item in items:
        if item.operator.is_adjustable:  # those that are compiled are, all at once, before the first of them runs
            chooser.for_operator(CallShapes.of(item.operator), item.variant, f"operator {item.operator.op_id}")
    build_all(chooser.to_compile, lambda built, every: progress(0, every, f"compiling: {built} of {every} kernels"))
    progress(0, 1, "canary")
    canary = Canary(target)
    right = right_kernels(items, dag, chooser, canary)
    refuse_wrong_base(right, items, dag.base, share, type_.name)
    for left_out in right.wrong:
        note(left_out_sentence(left_out, type_.name))
    items, choices = [*right.choices], right.choices
    complete = _complete(dag, items, variants)
    asked = {item: chooser.for_chain(item.requests(target)) for item in (distinct_chains(dag, variants) if with_chains else ())}
    fused = {item: choice for item, choice in asked.items() if choice is not None}
    efforts = (operator_effort, cast_effort, step_effort)
    store = ResumeStore(
        resume,
        {
            **software,
            "graph": dag_digest,
            "device": str(attrs.asdict(type_)),
            "job": job.name,
            "optimizer": describe_optimizer(job),
            "ladder": " ".join(map(str, variants)),
            "backend": "+".join(chooser.chain),
            "kernels": _kernels(choices),
            "number of ranks": str(rank_count()),
            "effort": " ".join(map(str, efforts)),
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
    layouts = dict(job.model.named_parameters())
    bench = _Bench(dag, layouts, chooser, make_stopwatch(target), store, *efforts, note)
    held = {operator.weight_format for operator in dag.adjustable} | {operator.result_format for operator in dag.operators}
    cast_sites = possible_casts(variants, sorted(held))
    total = len(items) + len(cast_sites) + len(fused) + sum(map(is_run_loss, dag.operators)) + len(complete) + 1
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        progress(done, total, what)
        done += 1

    build_all(chooser.to_compile, lambda built, every: progress(0, total, f"compiling: {built} of {every} kernels"))
    with ExitStack() as ending:
        if with_collectives:  # which start when all ranks are ready: none waits in one for a rank that failed
            ending.enter_context(together("profile", {"graph": dag_digest[:16]}, slow=True))
        ending.callback(store.flush)
        ending.enter_context(held_state(job.loss))
        costs: list[OpCost] = []
        index: dict[OpId, dict[Variant, int]] = {}
        for item in items:
            advance(f"operators: {item.operator.kind} {item.variant.label}")
            cost = bench.operator(item, choices[item])
            if cost is None:
                continue
            for op_id in item.holders:
                index.setdefault(op_id, {})[item.variant] = len(costs)
            costs.append(cost)
        casts: list[CastModel] = []
        for key, sites in cast_sites.items():
            advance(f"casts: {key.source}→{key.target}")
            casts.append(bench.cast(key, sites))
        chains: list[ChainCost] = []
        for chain, choice in fused.items():
            advance(f"chains: {chain.chain.producer}")
            chains.append(ChainCost(chain.holders, chain.run.form, chain.run.variant, bench.chain(chain, choice)))
        runner = StepRunner.start(job, target)
        for operator in filter(is_run_loss, dag.operators):
            advance("loss")
            index[operator.op_id] = {FLOAT32: len(costs)}
            costs.append(bench.loss(operator, runner))
        _watch_autocast(runner.model, target, store)
        steps: list[StepMeasurement] = []
        for variant in sorted(complete, key=lambda v: v != base):
            advance(f"whole step {variant.label}")
            chosen = {op_id: choices[item] for item in items if item.variant == variant for op_id in item.holders}
            steps.append(bench.step(runner, variant, chosen, steps[0] if steps else None))
        if runner.communicates:
            note(
                "ranks communicate in the model's forward: it is measured as if all others did as this rank does, so that step "
                "times leave these transfers out"
            )
        alternating = None
        rung = next((v for v in complete if v != base and not v.compute.needs_scale), complete[0])
        of_rung = next(step for step in steps if step.variant == rung)
        if target.type == "cuda" and rung != base and len(dag.adjustable) > 1 and may_bind(steps[0], of_rung):
            chosen = {op_id: choices[item] for item in items if item.variant == rung for op_id in item.holders}
            progress(done, total, "alternating steps")
            try:
                alternating = measure_alternating(runner, rung, dag, bench.stopwatch, chosen)
            except torch.OutOfMemoryError:  # a mixed step may need more than any rung's
                note("steps with every other operator lowered do not fit: mixed plans may take the CPU longer than predicted")
        progress(done, total, "what is handed on")
        if not runner.optimizer.state:
            runner.train_step(0)
        # A graph is traced on a CPU.
        handing_on = () if target.type == "cpu" else handed_on(runner.model, dag, lambda: runner.forward(0))
        state_bytes, input_bytes = runner.optimizer_state_bytes, runner.batches[0].nbytes
        advance("all-reduce")
    collective = measure_collective([bucket.nbytes for bucket in dag.buckets], target) if with_collectives else None
    memory = None
    if target.type == "cuda":
        rungs = (store.read(f"memory {variant}", RungMemory) for variant in complete)
        memory = DeviceMemory(outside_bytes(target), tuple(rung for rung in rungs if rung is not None))
        _note_fragmentation(memory, software, memory_cap_bytes, note)
    progress(total, total, "")
    return Profile(
        device=type_,
        software={
            **{name: value for name, value in {**software, CHECKED_ON: gpu_and_sms(target)}.items() if value},
            "autocast": store.read(_AUTOCAST, str) or software["autocast"],
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
        synchronises=runner.watch_synchronising(target),
        memory=memory,
        chains=tuple(chains),
        handed_on=tuple(op_id for op_id in handing_on if op_id in index),
        alternating=alternating,
        check=KernelCheck(canary.checked, right.wrong),
    )


def _complete(dag: PrecisionDag, items: Sequence[Item], variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants in which every adjustable operator has right kernels: whole steps are measured in these."""
    held: dict[Variant, set[OpId]] = {}
    for item in items:
        held.setdefault(item.variant, set()).update(item.holders)
    adjustable = {operator.op_id for operator in dag.adjustable}
    return tuple(variant for variant in variants if adjustable <= held.get(variant, set()) or not adjustable)


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


def _note_fragmentation(memory: DeviceMemory, software: Mapping[str, str], cap_bytes: int, note: Callable[[str], None]) -> None:
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


@attrs.frozen(eq=False)
class _Bench:
    """Makes one profile's measurements, except those that the store has from an earlier run."""

    dag: PrecisionDag
    layouts: Mapping[str, torch.Tensor]
    chooser: KernelChooser
    stopwatch: Stopwatch
    store: ResumeStore
    operator_effort: Effort
    cast_effort: Effort
    step_effort: Effort
    note: Callable[[str], None]

    def operator(self, item: Item, choice: KernelChoice) -> OpCost | None:
        """An operator's cost; None in a format that PyTorch does not run it in: the planner names it if a plan would need it.

        One that does not run alone in float32 either is free in all.
        """
        name = item.name if choice == KernelChoice() else f"{item.name} {choice.backend} {choice.config}"
        if name in self.store:
            return self.store.read(name, OpCost)
        cost = None
        try:
            with self._noting(f"operator {item.holders[0]} in {item.variant.label}"):
                cost = measure_operator(
                    item.operator, item.variant, self.layouts, choice, self.stopwatch, self.operator_effort, self.dag.autocast_base
                )
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if item.operator.is_adjustable:
                raise
            is_float32 = item.variant in (FLOAT32, Variant.plain(item.operator.result_format))
            free = _free(item.operator)
            if not is_float32 and self.operator(attrs.evolve(item, variant=FLOAT32), choice) == free:
                cost = free  # which is said
            elif is_float32 or item.variant == Variant.plain(self.dag.base):
                cost = self._say_free(item.operator, "on operands of random values", error)
        return self.store.write(name, cost)

    def loss(self, operator: Operator, runner: StepRunner) -> OpCost:
        """The cost of a loss that no graph holds.  It is not kept: no setting tells one such loss from another."""
        device = self.stopwatch.device
        make = partial(loss_case, runner.job, operator, runner.model, runner.batches[0], runner.alone)
        try:
            with self._noting(f"operator {operator.op_id}"):
                return measure_case(
                    make, KernelChoice(), self.stopwatch, self.operator_effort, autocast(self.dag.autocast_base, device)
                )
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            return self._say_free(operator, "on detached outputs", error)

    def _say_free(self, operator: Operator, where: str, error: RuntimeError) -> OpCost:
        self.note(
            f"operator {operator.op_id} ({operator.kind}) counts as free outside of whole steps: it does not run alone {where} "
            f"({first_line(error)})"
        )
        return _free(operator)

    def cast(self, key: CastKey, sites: frozenset[CastSite]) -> CastModel:
        """The costs of one kind of cast at the model's sizes."""
        name = f"cast {key.source} {key.target} {key.granularity} {key.rounding}{'' if key.symmetric else ' affine'}"
        name += f" {key.storage}" if key.storage.is_quantized else ""
        shapes = cast_shapes(self.dag, sites, key.granularity)
        return self.store.read(name, CastModel) or self.store.write(
            name, measure_cast(key, shapes, self.stopwatch, self.cast_effort, self.chooser)
        )

    def chain(self, item: ChainItem, choice: KernelChoice) -> OpCost:
        """The cost of a fused chain; like a cast's it is the time of passes over memory, so that it is repeated as long."""
        name = f"{item.name} {choice.backend} {choice.config}"
        known = self.store.read(name, OpCost)
        if known is not None:
            return known
        with self._noting(f"chain {item.holders[0]}"):
            make = partial(chain_case, self.dag, item, choice, self.stopwatch.device)
            return self.store.write(name, measure_case(make, choice, self.stopwatch, self.cast_effort))

    def step(
        self, runner: StepRunner, variant: Variant, choices: Mapping[OpId, KernelChoice], base: StepMeasurement | None
    ) -> StepMeasurement:
        """Whole steps with every adjustable operator in one variant.

        Raises:
            JobError: when they fail, naming the line.
        """
        name = f"step {variant}"
        known = self.store.read(name, StepMeasurement)
        if known is not None:
            return known
        try:
            with self._noting(f"whole step in {variant.label}"):
                measured = measure_step(runner, variant, self.dag, self.stopwatch, self.step_effort, base, choices)
        except Exception as error:
            # Of a function that fails under a plan, a forward says what a script can do; here a rung is what cannot run.
            failed = error.__cause__ if isinstance(error, PlanError) else error
            if failed is None or isinstance(failed, QSyncError):
                raise
            raise JobError(_failed_step(runner.job.name, variant, variant == Variant.plain(self.dag.base), failed)) from error
        if variant in runner.rungs:
            self.store.write(f"memory {variant}", runner.rungs[variant])
        return self.store.write(name, measured)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Says where a device's time could not be measured apart from the CPU's."""
        before = self.stopwatch.given_up
        yield
        if self.stopwatch.given_up > before:
            self.note(
                f"{what}: the device waited for the CPU while its time was measured (it synchronises often, or launches more than "
                "a launch queue holds within one call), so that its compute time may hold some of the CPU's"
            )


def _free(operator: Operator) -> OpCost:
    """No time, and all that it reads and writes kept for backward."""
    return OpCost(0, 0, 0, 0, saves_inputs=tuple(range(len(operator.inputs))), saves_output=True)


def _failed_step(job: str, variant: Variant, is_base: bool, error: BaseException) -> str:
    if is_base:
        return f"a training step of {job} fails{place_of(error)} ({first_line(error)}); see that it runs without QSync"
    return (
        f"{job} does not run with its operators in {variant.label}{place_of(error)} ({first_line(error)}); compute in float32 "
        f"there (x.float()), or leave {variant.label} off the ladder"
    )


def _kernels(choices: Mapping[Item, KernelChoice]) -> str:
    """A digest of the kernels that were chosen: a search since (``qsync tune``) may have found others."""
    rows = sorted(f"{item.name} {choice.backend} {choice.config}" for item, choice in choices.items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _watch_autocast(model: torch.nn.Module, device: torch.device, store: ResumeStore) -> None:
    """Keep the autocast in which the model's next forward runs: the job's own code switches it on."""

    def look(*_: Any) -> None:
        store.write(_AUTOCAST, active_autocast(device))
        handle.remove()

    handle = model.register_forward_pre_hook(look)


class ResumeStore:
    """Measured values by name, so that a killed run continues: one JSON file beside the output.

    The file holds the settings that its values depend on, and is ignored and overwritten where one of them is another now, or where
    it is damaged; ``discarded`` then says why.  It is replaced atomically at most twice a second.  Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, str]) -> None:
        self._path = path
        self._settings = dict(settings)
        self._values: dict[str, Any] = {}
        self._written = 0.0
        self.discarded = ""
        if path is not None and path.exists():
            self._values, self.discarded = _read(path, self._settings)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def read(self, name: str, kind: type[T]) -> T | None:
        """The measurement of that name; None where there is none, or where it turned out not to be possible.

        Raises:
            ArtifactError: when the file holds something else under that name.
        """
        plain = self._values.get(name)
        try:
            return from_plain(plain, kind) if plain else None
        except CodecError as error:
            raise ArtifactError(f"{self._path} is damaged, {name} has {error}; remove it, or start anew with --fresh") from None

    def write(self, name: str, value: T) -> T:
        """Keep a measurement, None for one that is not possible, and return it."""
        self._values[name] = None if value is None else to_plain(value)
        if time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.flush()
        return value

    def discard(self, why: str) -> None:
        """Forget all values."""
        self._values, self.discarded = {}, why

    def flush(self) -> None:
        """Write everything now.

        Raises:
            ArtifactError: when the file cannot be written; what it held stays.
        """
        if self._path is None:
            return
        content = {"format": _FORMAT, "settings": self._settings, "values": self._values}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content).encode())
        except OSError as error:
            raise ArtifactError(f"cannot write {self._path}: {error.strerror or error}") from None
        self._written = time.monotonic()


def _read(path: Path, settings: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The values of a file that belongs to these settings; else none, and why."""
    try:
        content = json.loads(read_whole(path, _MAX_BYTES, "files of an interrupted profile"))
    except (OSError, ValueError, RecursionError):
        return {}, "it is damaged"
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return {}, "another version of QSync wrote it, or it is damaged"
    theirs, values = content.get("settings"), content.get("values")
    if not isinstance(theirs, dict) or not isinstance(values, dict):
        return {}, "it is damaged"
    for name in dict.fromkeys(itertools.chain(settings, theirs)):
        if theirs.get(name) != settings.get(name):
            return {}, f"its {name} was {_short(theirs.get(name))} and is {_short(settings.get(name))} now"
    return values, ""


def _short(value: Any) -> str:
    text = "not recorded" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
