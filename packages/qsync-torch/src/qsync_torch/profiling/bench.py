"""The measurements of a profile, one a distinct cost, each kept for a run that continues it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.errors import JobError, PlanError, QSyncError
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import CastKey, CastModel, Compiled, OpCost, StepMeasurement
from qsync_core.ir.semantics import CastSite
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.devices import active_autocast
from qsync_torch.failures import first_line, place_of
from qsync_torch.job import autocast
from qsync_torch.profiling.benchmark_case import loss_case, make_case
from qsync_torch.profiling.cast_cost import cast_once, cast_shapes, measure_cast
from qsync_torch.profiling.chain_cost import ChainItem, chain_case
from qsync_torch.profiling.items import FLOAT32, Item
from qsync_torch.profiling.operator_cost import measure_case, measure_operator, run_once
from qsync_torch.profiling.resume_store import ResumeStore
from qsync_torch.profiling.whole_step import StepRunner, measure_step
from qsync_torch.timing import Effort, Stopwatch, Thunk
from qsync_torch.tuning.chooser import KernelChooser

AUTOCAST = "autocast"
"""Name under which the store keeps the autocast of the job's forward."""


@attrs.frozen
class Efforts:
    """How long one operator is timed, one size of a cast or of a chain, and whole steps."""

    operators: Effort = Effort(min_repeats=5, max_repeats=60, budget_s=0.3)  # noqa: RUF009 (frozen)
    casts: Effort = Effort(min_repeats=5, max_repeats=30, budget_s=0.05)  # noqa: RUF009 (frozen)
    steps: Effort = Effort(min_repeats=2, max_repeats=40, target=0.005, budget_s=1.0, warmup=0)  # noqa: RUF009 (frozen)


@attrs.frozen(eq=False)
class Bench:
    """Makes one profile's measurements, except those that the store has from an earlier run."""

    dag: PrecisionDag
    layouts: Mapping[str, torch.Tensor]
    chooser: KernelChooser
    stopwatch: Stopwatch
    store: ResumeStore
    efforts: Efforts
    note: Callable[[str], None]

    def first_calls(
        self,
        choices: Mapping[Item, KernelChoice],
        casts: Mapping[CastKey, frozenset[CastSite]],
        chains: Mapping[ChainItem, KernelChoice],
    ) -> Iterator[Thunk]:
        """A call of each operator and cast in 8 bit, and of each chain, that is still to be measured: all that backends run."""
        device = self.stopwatch.device
        for item, choice in choices.items():
            if item.variant.compute.needs_scale and _operator_name(item, choice) not in self.store:
                yield partial(run_once, partial(make_case, item.operator, item.variant, self.layouts, device, choice))
        for key, sites in casts.items():
            if key.target.needs_scale and _cast_name(key) not in self.store:
                for shape in cast_shapes(self.dag, sites, key.granularity):
                    yield partial(cast_once, key, shape, device, self.chooser)
        for chain, choice in chains.items():
            if _chain_name(chain, choice) not in self.store:
                yield partial(run_once, partial(chain_case, self.dag, chain, choice, device))

    def operator(self, item: Item, choice: KernelChoice) -> OpCost | None:
        """An operator's cost; None in a format that PyTorch does not run it in: the planner names it if a plan would need it.

        One that does not run alone in float32 either is free in all.
        """
        name = _operator_name(item, choice)
        if name in self.store:
            return self.store.read(name, OpCost)
        cost = None
        try:
            with self._noting(f"operator {item.holders[0]} in {item.variant.label}"):
                cost = measure_operator(
                    item.operator,
                    item.variant,
                    self.layouts,
                    choice,
                    self.stopwatch,
                    self.efforts.operators,
                    self.dag.autocast_base,
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
                    make, KernelChoice(), self.stopwatch, self.efforts.operators, autocast(self.dag.autocast_base, device)
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
        name = _cast_name(key)
        shapes = cast_shapes(self.dag, sites, key.granularity)
        return self.store.read(name, CastModel) or self.store.write(
            name, measure_cast(key, shapes, self.stopwatch, self.efforts.casts, self.chooser)
        )

    def chain(self, item: ChainItem, choice: KernelChoice) -> OpCost:
        """The cost of a fused chain; like a cast's it is the time of passes over memory, so that it is repeated as long."""
        name = _chain_name(item, choice)
        known = self.store.read(name, OpCost)
        if known is not None:
            return known
        with self._noting(f"chain {item.holders[0]}"):
            make = partial(chain_case, self.dag, item, choice, self.stopwatch.device)
            return self.store.write(name, measure_case(make, choice, self.stopwatch, self.efforts.casts))

    def step(
        self,
        runner: StepRunner,
        variant: Variant,
        choices: Mapping[OpId, KernelChoice],
        base: StepMeasurement | None,
        lowered: tuple[OpId, ...] | None = None,
        *,
        may_not_fit: bool = False,
    ) -> StepMeasurement:
        """Whole steps with every adjustable operator in one variant, or some of them.

        Raises:
            JobError: when they fail, naming the line.
            torch.OutOfMemoryError: when memory is short, and ``may_not_fit``.
        """
        name = f"step {variant}" if lowered is None else f"step {variant} of {' '.join(map(str, lowered))}"
        known = self.store.read(name, StepMeasurement)
        if known is not None:
            return known
        try:
            with self._noting(f"whole step in {variant.label}"):
                measured = measure_step(runner, variant, self.dag, self.stopwatch, self.efforts.steps, base, choices, lowered)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and may_not_fit:
                raise
            # Of a function that fails under a plan, a forward says what a script can do; here a rung is what cannot run.
            failed = error.__cause__ if isinstance(error, PlanError) else error
            if failed is None or isinstance(failed, QSyncError):
                raise
            is_base = variant == Variant.plain(self.dag.base)
            raise JobError(_failed_step(runner.job.name, variant, is_base, failed, runner.compiled)) from error
        if lowered is None and variant in runner.rungs:
            self.store.write(f"memory {variant}", runner.rungs[variant])
        return self.store.write(name, measured)

    def watch_autocast(self, model: torch.nn.Module) -> None:
        """Keep the autocast in which the model's next forward runs: the job's own code switches it on."""

        def look(*_: Any) -> None:
            self.store.write(AUTOCAST, active_autocast(self.stopwatch.device))
            handle.remove()

        handle = model.register_forward_pre_hook(look)

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


def _operator_name(item: Item, choice: KernelChoice) -> str:
    return item.name if choice == KernelChoice() else f"{item.name} {choice.backend} {choice.config}"


def _cast_name(key: CastKey) -> str:
    name = f"cast {key.source} {key.target} {key.granularity} {key.rounding}{'' if key.symmetric else ' affine'}"
    return f"{name} {key.storage}" if key.storage.is_quantized else name


def _chain_name(item: ChainItem, choice: KernelChoice) -> str:
    return f"{item.name} {choice.backend} {choice.config}"


def _free(operator: Operator) -> OpCost:
    """No time, and all that it reads and writes kept for backward."""
    return OpCost(0, 0, 0, 0, saves_inputs=tuple(range(len(operator.inputs))), saves_output=True)


def _failed_step(job: str, variant: Variant, is_base: bool, error: BaseException, compiled: Compiled | None) -> str:
    how, otherwise = "", ""
    if compiled is not None:
        how = f", compiled by {compiled},"
        otherwise = ", or where the script does not compile this model, say qsync.hybrid(..., compiles=False)"
    if is_base:
        return (
            f"a training step of {job}{how} fails{place_of(error)} ({first_line(error)}); see that it runs without QSync{otherwise}"
        )
    compiler = sys.modules.get("torch._dynamo.exc")  # an error of its own is none of formats
    of_compiler = compiler is not None and isinstance(error, compiler.InternalTorchDynamoError)
    advice = "" if of_compiler else "compute in float32 there (x.float()), or "
    return (
        f"{job}{how} does not run with its operators in {variant.label}{place_of(error)} ({first_line(error)}); {advice}leave "
        f"{variant.label} off the ladder{otherwise}"
    )
