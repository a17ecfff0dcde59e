"""``profile``: what a model costs on one device type, each distinct cost measured once.

See docs/design/cost-mapper.md#profiled-costs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.files import digest
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import CastKey, CastModel, DeviceType, OpCost, Profile, StepMeasurement
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes
from qsync_core.progress import ProgressCallback, silent
from qsync_torch.devices import device_type, parse_device, software_versions
from qsync_torch.job import Job, check_same_model
from qsync_torch.kernels.selection import AUTO, DEFAULT_BACKEND, default_backend
from qsync_torch.kernels.store import open_store
from qsync_torch.profiling.adjustable_call import prepare_adjustable
from qsync_torch.profiling.cast_cost import cast_shapes, measure_cast
from qsync_torch.profiling.cast_keys import activation_precisions, possible_casts
from qsync_torch.profiling.collective import measure_collective
from qsync_torch.profiling.operator_cost import measure_operator
from qsync_torch.profiling.replay_call import prepare_call
from qsync_torch.profiling.whole_step import StepRunner, measure_step
from qsync_torch.timing import Effort, Stopwatch, make_stopwatch
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tuning.chooser import KernelChooser

T = TypeVar("T")


BASE = Variant.plain(Precision.FLOAT32)
OPERATOR_EFFORT = Effort(min_repeats=5, max_repeats=60, budget_s=0.3)
CAST_EFFORT = Effort(min_repeats=5, max_repeats=30, budget_s=0.05)
_FORMAT = 1
_WRITE_EVERY_S = 0.5
STEP_EFFORT = Effort(min_repeats=2, max_repeats=40, target=0.005, budget_s=1.0, warmup=0)


@attrs.frozen
class Item:
    """One distinct measurement and the operators that it holds for."""

    operator: Operator
    variant: Variant
    holders: tuple[OpId, ...]

    @property
    def name(self) -> str:
        """Under which its measurement is kept."""
        return f"operator {self.operator.cost_key!r} {self.operator.no_grad_inputs} {self.variant}"


def profile(
    job: Job,
    dag: PrecisionDag,
    *,
    device: str | torch.device = "cpu",
    share: float = 1.0,
    memory_cap_bytes: int = 0,
    ladder: Sequence[Variant] = (Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16), BASE),
    backend: str | None = None,
    tuning: Path | None = None,
    resume: Path | None = None,
    with_collectives: bool = True,
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

    Args:
        job: what is trained; its model is copied to the device and not changed.
        dag: its graph (``trace(job)``).
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        share: share of the device that the job gets; recorded, and part of what a plan matches.
        memory_cap_bytes: memory that the job may use, 0 for all; recorded likewise.
        ladder: variants a plan may use; float32 is always measured as well.
        backend: kernels of the adjustable operators; ``a+b`` means a, and b for what a does not offer; ``auto`` whatever ``qsync
            tune`` found fastest for each.  By default ``auto`` on a GPU and ``aten`` on a CPU.
        tuning: file of tuning records; :func:`qsync_core.tuning.store.default_store_path` by default.
        resume: file in which finished measurements are kept, so that a killed run continues; the caller removes it.
        with_collectives: measure all-reduces; without, ranks need not finish at the same time.
        progress: told how far it is.
        note: told in a sentence what a reader of the profile should know.
        operator_effort, cast_effort, step_effort: how long to repeat.

    Raises:
        QSyncError: when the device is not there, the graph is of another model, or a kernel can not run.
    """
    target = parse_device(str(device))
    check_same_model(job, dag)
    chooser = chooser_of(target, backend, tuning)
    variants = tuple(dict.fromkeys((*ladder, BASE)))
    type_ = device_type(target, share, memory_cap_bytes)
    software = software_versions(target)
    dag_digest = digest(dag)
    store = ResumeStore(resume, _store_digest(dag_digest, type_, software, job, chooser.chain))
    stopwatch = make_stopwatch(target)

    items = distinct_items(dag, variants)
    kernels = {item: _chosen(chooser, item) for item in items}
    if chooser.chain == AUTO and chooser.untuned:
        note(f"{len(chooser.untuned)} kernels were never tuned here and take a default; run 'qsync tune' first to find the fastest")
    layouts = dict(job.model.named_parameters())
    cast_sites = possible_casts(variants)
    total = len(items) + len(cast_sites) + len(variants) + 1
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        progress(done, total, what)
        done += 1

    try:
        costs: list[OpCost] = []
        index: dict[OpId, dict[Variant, int]] = {}
        for item in items:
            advance(f"{item.operator.kind} {item.variant.label}")
            chosen = kernels[item]
            name = item.name if chosen == KernelChoice() else f"{item.name} {chosen.backend} {chosen.config}"
            cost = _measured(store, name, OpCost, partial(_measure, item, layouts, stopwatch, chosen, operator_effort))
            if cost is None:
                continue
            for op_id in item.holders:
                index.setdefault(op_id, {})[item.variant] = len(costs)
            costs.append(cost)
        casts = []
        for key, sites in cast_sites.items():
            advance(f"cast {key.source}→{key.target}")
            casts.append(_measure_cast(store, dag, key, sites, stopwatch, cast_effort, chooser))
        runner = StepRunner.start(job, target)
        steps = []
        for variant in sorted(variants, key=lambda v: v != BASE):
            advance(f"whole step {variant.label}")
            found = _measured(
                store,
                f"step {variant}",
                partial(StepMeasurement, variant=variant),
                partial(
                    measure_step, runner, variant, dag, stopwatch, step_effort, steps[0] if steps else None, _of(variant, kernels)
                ),
            )
            assert found is not None
            steps.append(found)
        if not runner.optimizer.state:
            runner.train_step(0)
        state_bytes, input_bytes = runner.optimizer_state_bytes, runner.batches[0].nbytes
        advance("all-reduce")
        collective = measure_collective([bucket.nbytes for bucket in dag.buckets], target) if with_collectives else None
    finally:
        store.flush()
    progress(total, total, "")
    return Profile(
        device=type_,
        software=software | chooser.versions(kernels.values()),
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
    )


def distinct_items(dag: PrecisionDag, ladder: Sequence[Variant]) -> list[Item]:
    """Each distinct (cost key, variant) once, with all operators that share it.

    Adjustable operators in every variant of the ladder, dependent and guarded ones in every format an activation can arrive in,
    fixed ones (and those that ``apply_`` can not address) in float32.  Graph inputs cost nothing and are left out.
    """
    formats = [Variant.plain(precision) for precision in activation_precisions(ladder)]
    holders: dict[tuple[object, ...], list[Operator]] = {}
    for operator in dag.operators:
        if operator.is_adjustable or AtenCall.of(operator) is not None:
            key = (operator.cost_key, operator.op_class, operator.is_adjustable, operator.no_grad_inputs)
            holders.setdefault(key, []).append(operator)
    items = []
    for operators in holders.values():
        first = operators[0]
        variants: Sequence[Variant] = [BASE]
        if first.is_adjustable:
            variants = ladder
        elif first.op_class in (OpClass.DEPENDENT, OpClass.GUARDED):
            variants = formats
        ids = tuple(operator.op_id for operator in operators)
        items.extend(Item(first, variant, ids) for variant in variants)
    return items


def chooser_of(device: torch.device, backend: str | None, tuning: Path | None) -> KernelChooser:
    """Who chooses kernels: with the records of this machine, unless PyTorch's own are all that is asked for."""
    backend = default_backend(device) if backend is None else backend
    return KernelChooser(device, backend, None if backend == DEFAULT_BACKEND else open_store(device, tuning))


def _chosen(chooser: KernelChooser, item: Item) -> KernelChoice:
    operator = item.operator
    if not operator.is_adjustable:
        return KernelChoice()
    return chooser.for_operator(CallShapes.of(operator), item.variant, f"operator {operator.op_id}")


def _of(variant: Variant, kernels: Mapping[Item, KernelChoice]) -> dict[OpId, KernelChoice]:
    return {op_id: chosen for item, chosen in kernels.items() if item.variant == variant for op_id in item.holders}


def _measure(
    item: Item, layouts: Mapping[str, torch.Tensor], stopwatch: Stopwatch, chosen: KernelChoice, effort: Effort
) -> OpCost | None:
    operator, device = item.operator, stopwatch.device
    if operator.is_adjustable:
        prepare = partial(prepare_adjustable, operator, item.variant, layouts, device, chosen)
        return measure_operator(prepare, stopwatch, effort, backend=chosen.backend, config=chosen.config)
    prepare = partial(prepare_call, operator, device, item.variant.compute)
    try:
        return measure_operator(prepare, stopwatch, effort)
    except RuntimeError as error:
        # ATen has no such kernel; the planner names the operator if a plan would need it.
        if "not implemented for" in str(error) and item.variant != BASE:
            return None
        raise


def _measure_cast(
    store: ResumeStore,
    dag: PrecisionDag,
    key: CastKey,
    sites: frozenset[CastSite],
    stopwatch: Stopwatch,
    effort: Effort,
    chooser: KernelChooser,
) -> CastModel:
    name = f"cast {key.source} {key.target} {key.granularity} {key.rounding}"
    shapes = cast_shapes(dag, sites, key.granularity)
    found = _measured(store, name, partial(CastModel, key=key), partial(measure_cast, key, shapes, stopwatch, effort, chooser))
    assert found is not None
    return found


def _measured(store: ResumeStore, name: str, restore: Callable[..., T], measure: Callable[[], T | None]) -> T | None:
    """The stored measurement of that name, or a new one; None where it can not be run."""
    stored = store.get(name)
    if stored is not None:
        return restore(**{field: _tuples(value) for field, value in stored.items()}) if stored else None
    found = measure()
    store.put(name, {} if found is None else attrs.asdict(found, recurse=False, filter=_is_plain))
    return found


def _is_plain(attribute: attrs.Attribute[Any], value: Any) -> bool:
    return not attrs.has(type(value))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _store_digest(dag_digest: str, type_: DeviceType, software: dict[str, str], job: Job, chain: tuple[str, ...]) -> str:
    content = [dag_digest, attrs.asdict(type_), software, job.name, job.batch_size, "+".join(chain)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class ResumeStore:
    """Measured values by name, so that a killed run continues: one JSON file beside the output, valid for one digest only.

    The file is replaced atomically at most twice a second; one that is damaged, or that belongs to another digest (another model,
    device, software or setting), is ignored and overwritten.  Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._values: dict[str, Any] = {}
        self._written = 0.0
        if path is not None:
            self._values = _read(path, digest)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> Any | None:
        """The value stored under ``key``, or None."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value."""
        self._values[key] = value
        if time.monotonic() - self._written >= _WRITE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write everything now."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": _FORMAT, "digest": self._digest, "values": self._values}
        write_atomically(self._path, json.dumps(content).encode())
        self._written = time.monotonic()


def _read(path: Path, digest: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("digest") != digest:
        return {}
    values = content.get("values")
    return values if isinstance(values, dict) else {}
