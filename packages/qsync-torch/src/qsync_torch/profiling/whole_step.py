"""Whole training steps, measured with every adjustable operator at one rung: what the sum of parts is calibrated with."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import attrs
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qsync_torch as qsync
from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.profile import AlternatingDispatch, BatchStep, Compiled, Compiler, Profile, RungMemory, StepMeasurement
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.apply.stored_modules import stored_tensors
from qsync_torch.distributed.alone import Alone
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.dtypes import LOW_FLOATS
from qsync_torch.failures import first_line
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.device_waits import waits_for_device
from qsync_torch.profiling.memory import kept_for_backward, measure_memory, memory_rise, passing_rise, storage_bytes
from qsync_torch.timing import Effort, Stopwatch, relative_spread, repeat

if TYPE_CHECKING:
    from qsync_torch.apply.applied_plan import AppliedPlan

BATCHES = 4
"""Different batches that the measured steps go through in turn."""
_STEPS_TO_MEET = 2
"""Steps in which collectives are looked for: a model's first one may be special."""
_LONG_STEP_NS = 300_000_000
"""Steps on a CPU beyond this are measured without their optimizer where that is known."""
_ISSUE_EFFORT = Effort(min_repeats=5, max_repeats=9, target=0.01, budget_s=1.0, warmup=1)
"""The CPU's times scatter more than the device's."""
_TURN_EFFORT = attrs.evolve(_ISSUE_EFFORT, min_repeats=2, max_repeats=2, warmup=2)
"""A plan's first step takes the CPU half as long again, and its second a little longer."""
_TURNS = 3
_FILLS = 0.97
"""Share of the period from which the device's work fills it: it is measured to about 1%."""
_FAR_LESS = 0.8
"""Dispatch below this share of compute cannot be what lengthens the period."""
_MAY_BIND = 0.3
"""Share of the period, both the means of two rungs, from which dispatch may bind a plan between them.

Operators of both take the CPU up to 60% longer than that mean, and a step that synchronises is bound before its device is busy all
the time.  Of BERT-base's mixed steps alternating dispatch makes 2 to 6 of 50 ms at 0.53, and from 0.36 downwards at most 0.1 ms,
as of three other models'.
"""
_SPINS = 3
"""Steps until the spin before a compiled phase is long enough."""
_PERIOD_NS, _PERIOD_STEPS = 1_000_000_000, (3, 10)
"""How long steps run back to back on a CUDA device to measure the steady-state period; how many they are at least and at most."""


@attrs.define(eq=False)
class StepRunner:
    """A private copy of a job's model on one device, with its optimizer and some batches, ready to train.

    ``update_rise`` are the bytes that the optimizer needs for a while in each step, once it has been watched on a CPU;
    ``synchronises`` says whether a step waits for the device, once that was looked for; ``rungs`` is the memory of the steps
    measured on a CUDA device; ``compiled`` says how the script compiles the model, and ``compile_s`` is how many seconds that
    took.  ``apart`` is the device of a model that does not fit there as the script has it: it waits on the CPU, and is there while
    some of its weights are stored otherwise.  ``alone`` answers collectives in the model for the ranks that do not step meanwhile;
    None where there are no other ranks, or none is asked.
    """

    job: Job
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[Batch]
    update_rise: int | None = None
    synchronises: bool | None = None
    rungs: dict[Variant, RungMemory] = attrs.field(factory=dict)
    alone: Alone | None = None
    compiled: Compiled | None = None
    compile_s: float = 0.0
    apart: torch.device | None = None

    @classmethod
    def start(
        cls,
        job: Job,
        device: torch.device,
        batches: int = BATCHES,
        compiled: Compiled | None = None,
        *,
        widened: bool = False,
        apart: bool = False,
    ) -> StepRunner:
        """Copy the job's model to ``device`` in training mode; the job's own is not touched.

        Args:
            widened: 16-bit parameters and buffers are float32 in the copy.
            apart: leave the copy on the CPU until weights are stored; steps are run under :meth:`present`.
        """
        model = job.copy_model().to("cpu" if apart else device).train()
        for tensor in (*model.parameters(), *model.buffers()) if widened else ():
            if tensor.dtype in LOW_FLOATS:
                tensor.data = tensor.data.float()
        optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        given = [job.batch(step, job.batch_size).to(device) for step in range(batches)]
        runner = cls(job, model, optimizer, given, compiled=compiled, apart=device if apart else None)
        if rank_count() > 1 and batches and not apart:
            runner._meet_collectives(device)
        return runner

    @property
    def communicates(self) -> bool:
        """Whether the model has waited for other ranks."""
        return self.alone is not None and self.alone.communicates

    def _meet_collectives(self, device: torch.device) -> None:
        """Find out whether the model waits for other ranks; on a GPU, whose steps a mode may lengthen, and where a compiler would
        read the mode, in its first steps alone."""
        self.alone = Alone()
        if device.type == "cuda" or self.compiled is not None:
            for step in range(_STEPS_TO_MEET):
                self.forward(step).backward()
            self.optimizer.zero_grad(set_to_none=True)
            if not self.communicates:
                self.alone = None
            else:
                self.compiled = None  # no graph is made of answers in place of other ranks

    def forward(self, step: int) -> torch.Tensor:
        """Forward pass and loss of the batch of a step."""
        batch = self.batches[step % len(self.batches)]
        if self.alone is None:
            return self.job.compute_loss(batch, self.model)
        return self.alone.run(self.job.compute_loss, batch, self.model)

    def update(self) -> None:
        """Optimizer step and zeroing of gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train_step(self, step: int) -> None:
        """One whole step."""
        loss = self.forward(step)
        loss.backward()
        if self.job.reads_loss:
            loss.item()
        del loss
        self.update()

    def watch_synchronising(self, device: torch.device) -> bool:
        """Whether a step waits for the device by itself; runs one the first time."""
        if self.synchronises is None:
            self.synchronises = waits_for_device(lambda: self.train_step(0), device)
        return self.synchronises

    @contextmanager
    def compiling(self, applied: AppliedPlan | None) -> Iterator[None]:
        """Have the model compiled as the script has it, under the plan that is in force; where it does not, as it is.

        A first step is run, which compiles.  Afterwards the compiler forgets all its graphs: it makes no more than a few of one
        function, and keeps their memory.

        Raises:
            Exception: whatever the compiler raises.
        """
        if self.compiled is None:
            yield
            return
        plain = self.model
        try:
            self.model = compiled_model(plain, self.compiled, applied)
            began = time.monotonic()
            self.forward(0).backward()
            self.optimizer.zero_grad(set_to_none=True)
            self.compile_s += time.monotonic() - began
            yield
        finally:
            self.model = plain
            torch.compiler.reset()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have a model that waits apart on its device; stored weights come in the formats in which they are."""
        if self.apart is None:
            yield
            return
        try:
            self.model.to(self.apart)
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.model.to("cpu")

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps of a forward for its backward, beside what lives anyway; runs one."""
        static = itertools.chain(self.model.parameters(), self.model.buffers(), self.batches[0].tensors)
        return kept_for_backward(self.forward(0), static)

    @property
    def optimizer_state_bytes(self) -> int:
        """Bytes of the optimizer's state tensors of one element or more."""
        state = [t for entry in self.optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        return storage_bytes(state)

    @property
    def beside(self) -> Iterator[torch.Tensor]:
        """Tensors that training does not have: the job's own model, and all batches but one."""
        yield from self.job.model.parameters()
        yield from self.job.model.buffers()
        for batch in self.batches[1:]:
            yield from batch.tensors

    @property
    def static_bytes(self) -> int:
        """Weights, buffers, optimizer state and one batch."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *stored_tensors(self.model)]
        return storage_bytes(tensors) + self.optimizer_state_bytes + self.batches[0].nbytes


def compiled_model(model: torch.nn.Module, how: Compiled, applied: AppliedPlan | None) -> torch.nn.Module:
    """Compile a model, under a plan or none, or DistributedDataParallel around it, as a script does."""
    compiler = qsync.compile if how.by is Compiler.QSYNC and applied is not None else torch.compile
    return cast(torch.nn.Module, compiler(model, backend=how.backend))


def measure_at(
    job: Job,
    dag: PrecisionDag,
    profile: Profile,
    ladder: Collection[Variant],
    stopwatch: Stopwatch,
    effort: Effort,
    batch_size: int,
    note: Callable[[str], None],
) -> tuple[BatchStep, ...]:
    """Measure whole steps at another local batch than the job's, in the base precision and at the fastest rung of its profile.

    No plan has a rung that is not on the group's ``ladder``, and none such is measured.  A step at the rung that fails is told
    (``note``), and left out.

    Raises:
        torch.OutOfMemoryError: when memory is short for it.
        JobError: when the job has no batch of that size.
    """
    runner = StepRunner.start(attrs.evolve(job, batch_size=batch_size), stopwatch.device, compiled=job.compiles)
    base = Variant.plain(dag.base)
    found = [measure_step(runner, base, dag, stopwatch, effort)]
    of_plans = [step for step in profile.steps if step.variant == base or step.variant in ladder]
    fastest = min(of_plans, key=lambda step: step.iteration_ns).variant if of_plans else base
    if fastest != base:
        indices = {operator.op_id: profile.cost_index[operator.op_id] for operator in dag.adjustable}
        costs = {op_id: profile.costs[index[fastest]] for op_id, index in indices.items() if fastest in index}
        chosen = {op_id: KernelChoice.parse(cost.backend, cost.config) for op_id, cost in costs.items()}
        try:
            found.append(measure_step(runner, fastest, dag, stopwatch, effort, found[0], chosen))
        except (QSyncError, RuntimeError) as error:  # memory is short, say
            note(f"a step of {batch_size} samples in {fastest.label} is not measured ({first_line(error)})")
    return tuple(BatchStep(batch_size, step) for step in found)


def measure_step(
    runner: StepRunner,
    variant: Variant,
    dag: PrecisionDag,
    stopwatch: Stopwatch,
    effort: Effort,
    base: StepMeasurement | None = None,
    chosen: Mapping[OpId, KernelChoice] | None = None,
    lowered: Collection[OpId] | None = None,
) -> StepMeasurement:
    """Measure whole steps with every adjustable operator of ``dag`` in ``variant``; the runner's model is left as it was found.

    ``lowered`` names those that are, where the others stay at the base precision.

    ``chosen`` are the kernels of each operator, PyTorch's own where it says nothing.  ``base`` is an earlier measurement of the
    same model: where its step is long, the optimizer's time, which no variant changes, is not measured again.
    """
    with lowered_steps(runner, dag.index if lowered is None else lowered, variant, dag, chosen or {}) as applied:
        runner.watch_synchronising(stopwatch.device)
        known = _known_optimizer_ns(stopwatch.device, base)
        cut = runner.compiled is not None and runner.compiled.around_ddp and rank_count() > 1
        with runner.compiling(applied):
            # The step that is watched for its memory also warms up.
            peak_bytes = _peak_bytes(runner, variant, stopwatch.device, with_update=known is None)
            kept = None if runner.compiled is None else runner.saved_bytes
            if rank_count() < 2:
                found = _measure(runner, variant, stopwatch, effort, known, peak_bytes)
            elif not cut:
                with _group_of_one() as group:
                    # Not kept in a variable: a wrapper that outlives its process group can abort the process at its end.
                    found = _measure(_wrapped(runner, group), variant, stopwatch, effort, known, peak_bytes)
        if cut:
            found = _measure_cut(runner, applied, variant, stopwatch, effort, known, peak_bytes)
        return attrs.evolve(found, saved_bytes=kept)


def _measure_cut(
    runner: StepRunner,
    applied: AppliedPlan | None,
    variant: Variant,
    stopwatch: Stopwatch,
    effort: Effort,
    optimizer_ns: int | None,
    peak_bytes: int,
) -> StepMeasurement:
    """The same where what is compiled is the wrapper: memory was that of graphs without cuts, and buckets are the planner's."""
    with _group_of_one() as group:
        wrapped = _wrapped(runner, group)
        with wrapped.compiling(applied):
            found = _measure(wrapped, variant, stopwatch, effort, optimizer_ns, peak_bytes)
        runner.compile_s = wrapped.compile_s
        del wrapped
    return found


def may_bind(base: StepMeasurement, rung: StepMeasurement) -> bool:
    """Whether the CPU's dispatch may be the whole of a step that mixes a rung and the base precision."""
    ends = (base, rung)
    issued_ns = sum(step.forward_dispatch_ns + step.backward_dispatch_ns + step.optimizer_dispatch_ns for step in ends)
    return issued_ns > _MAY_BIND * sum(step.iteration_ns for step in ends)


def measure_alternating(
    runner: StepRunner, variant: Variant, dag: PrecisionDag, stopwatch: Stopwatch, chosen: Mapping[OpId, KernelChoice]
) -> AlternatingDispatch:
    """Time how the CPU issues steps with none, every other and all adjustable operators at one rung.

    In short turns, to and back, because a CPU is not as fast at all times, and one whose cores others share may become half as fast
    within a second: what changes evenly during a turn cancels out, and the median leaves out a turn in which it leapt.
    """
    ids = [operator.op_id for operator in dag.adjustable]
    steps = itertools.count()

    def issued(lowered: Sequence[OpId]) -> tuple[int, ...]:
        with lowered_steps(runner, lowered, variant, dag, chosen):
            return repeat(lambda: _issue_times(runner, next(steps), stopwatch), _TURN_EFFORT).median_ns

    found, none = [], issued(())
    for _ in range(_TURNS):
        half, every, half2, none2 = (issued(lowered) for lowered in (ids[1::2], ids, ids[1::2], ()))
        found.append([(half[i] + half2[i] - every[i] - (none[i] + none2[i]) // 2) // 2 for i in range(2)])
        none = none2  # a turn begins where the last one ended
    forward, backward = (round(statistics.median(column)) for column in zip(*found, strict=True))
    return AlternatingDispatch(variant, max(0, forward), max(0, backward))


@contextmanager
def lowered_steps(
    runner: StepRunner, lowered: Collection[OpId], variant: Variant, dag: PrecisionDag, chosen: Mapping[OpId, KernelChoice]
) -> Iterator[AppliedPlan | None]:
    """A plan with some operators in a variant and the others at the base precision; none at all where it lowers none."""
    lowered = {op_id for op_id in lowered if dag[op_id].is_adjustable and dag[op_id].runs_in(variant)}
    if not lowered or variant == Variant.plain(dag.base):
        yield None
        return
    from qsync_torch.apply.apply import apply_

    plain, entries = KernelChoice(), {}
    runs = {operator.op_id: variant if operator.op_id in lowered else Variant.plain(dag.base) for operator in dag.adjustable}
    for op_id, run in OutputFormats.of(dag).decided(runs).items():
        kernel = chosen.get(op_id, plain) if op_id in lowered else plain
        entries[op_id] = Assignment(run, kernel.backend, kernel.config, "")
    applied = apply_(runner.model, entries, base=dag.base, keep_stored=True)
    try:
        with runner.present():
            yield applied
    finally:
        applied.remove()


@contextmanager
def _group_of_one() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        yield group
    finally:
        gc.collect()
        dist.destroy_process_group(group)


def _wrapped(runner: StepRunner, group: dist.ProcessGroup) -> StepRunner:
    """The runner as training will have it among several ranks: in DistributedDataParallel, whose hooks and copies of gradients are
    part of the step; alone in its group, because waiting for other ranks is not."""
    runner.forward(0).backward()
    unused = any(p.requires_grad and p.grad is None for p in runner.model.parameters())
    runner.optimizer.zero_grad(set_to_none=True)
    return attrs.evolve(runner, model=DistributedDataParallel(runner.model, process_group=group, find_unused_parameters=unused))


def _known_optimizer_ns(device: torch.device, base: StepMeasurement | None) -> int | None:
    """The optimizer's time where steps are too long to run it for every rung."""
    return base.optimizer_compute_ns if device.type == "cpu" and base is not None and base.iteration_ns > _LONG_STEP_NS else None


def _measure(
    runner: StepRunner, variant: Variant, stopwatch: Stopwatch, effort: Effort, optimizer_ns: int | None, peak_bytes: int
) -> StepMeasurement:
    if stopwatch.device.type == "cpu":
        timing = repeat(_synchronous_sample(runner, optimizer_ns), effort)
        forward, backward, optimizer = timing.median_ns  # all of which count as compute
        return StepMeasurement(variant, sum(timing.median_ns), 0, forward, 0, backward, 0, optimizer, peak_bytes, timing.spread)
    return _measure_cuda(runner, variant, stopwatch, effort, peak_bytes)


def _peak_bytes(runner: StepRunner, variant: Variant, device: torch.device, *, with_update: bool) -> int:
    """Peak of one step with everything that lives between steps; on a CPU the update runs only if asked for or never watched."""
    if device.type != "cpu":
        runner.train_step(0)  # makes the optimizer's state and libraries' workspaces, which stay
        found = measure_memory(lambda: runner.train_step(0), variant, device, runner.beside)
        runner.rungs[variant] = found
        return found.allocated_bytes
    rise, gradients = memory_rise(lambda: runner.forward(0).backward())
    if with_update or runner.update_rise is None:
        # A first update also makes the optimizer's state, which stays and is among the static bytes.
        runner.update_rise = passing_rise(runner.optimizer.step)
    runner.optimizer.zero_grad(set_to_none=True)
    return runner.static_bytes + max(rise, gradients + runner.update_rise)


def _synchronous_sample(runner: StepRunner, optimizer_ns: int | None) -> Callable[[], tuple[int, int, int]]:
    """A function that runs the next step and returns the times of forward, backward and optimizer (not run where it is given)."""
    steps = itertools.count()

    def sample() -> tuple[int, int, int]:
        start = time.perf_counter_ns()
        loss = runner.forward(next(steps))
        forwarded = time.perf_counter_ns()
        loss.backward()
        del loss
        backwarded = time.perf_counter_ns()
        if optimizer_ns is not None:
            runner.optimizer.zero_grad(set_to_none=True)
            return forwarded - start, backwarded - forwarded, optimizer_ns
        runner.update()
        return forwarded - start, backwarded - forwarded, time.perf_counter_ns() - backwarded

    return sample


def _measure_cuda(runner: StepRunner, variant: Variant, stopwatch: Stopwatch, effort: Effort, peak_bytes: int) -> StepMeasurement:
    """Phases apart, issue and device, then steps back to back (docs/design/cost-mapper.md#whole-steps-on-a-gpu)."""
    steps = itertools.count()
    dispatch = repeat(lambda: _issue_times(runner, next(steps), stopwatch), _ISSUE_EFFORT).median_ns
    if runner.compiled is not None:
        effort = attrs.evolve(effort, warmup=max(_SPINS, effort.warmup))
    compute = repeat(lambda: _device_times(runner, next(steps), stopwatch), effort).median_ns
    least, most = _PERIOD_STEPS
    in_a_row = min(most, max(least, math.ceil(_PERIOD_NS / max(1, sum(dispatch), sum(compute)))))
    periods = []
    for _ in range(3):
        stopwatch.synchronize()
        start = stopwatch.clock()
        for index in range(in_a_row):
            runner.train_step(index)
        stopwatch.synchronize()
        periods.append((stopwatch.clock() - start) / in_a_row)
    period_ns = round(statistics.median(periods))
    dispatch, compute = fill_period(dispatch, compute, period_ns, synchronises=bool(runner.synchronises))
    return StepMeasurement(
        variant,
        period_ns,
        *(dispatch[0], compute[0]),
        *(dispatch[1], compute[1]),
        *(dispatch[2], compute[2]),
        peak_bytes,
        relative_spread(periods),
    )


def _issue_times(runner: StepRunner, step: int, stopwatch: Stopwatch) -> tuple[int, ...]:
    """How long the CPU takes to issue forward, backward and optimizer, each to an idle device.

    Behind a spin, a step's kernels would fill the launch queue and the CPU would wait.
    """
    loss: torch.Tensor | None = None

    def forward() -> None:
        nonlocal loss
        loss = runner.forward(step)

    def backward() -> None:
        nonlocal loss
        assert loss is not None
        loss.backward()
        loss = None

    times = []
    for phase in (forward, backward, runner.update):
        stopwatch.synchronize()
        start = stopwatch.clock()
        phase()
        times.append(stopwatch.clock() - start)
    return tuple(times)


def _device_times(runner: StepRunner, step: int, stopwatch: Stopwatch) -> tuple[int, ...]:
    """How long the device takes for forward, backward and optimizer where it never waits for the CPU."""
    timed = stopwatch.time_phase if runner.compiled is None else stopwatch.time_whole
    loss, forward = timed(lambda: runner.forward(step))
    _, backward = timed(loss.backward)
    del loss
    _, optimizer = timed(runner.update)
    return forward, backward, optimizer


def fill_period(
    dispatch: Sequence[int], compute: Sequence[int], period_ns: int, *, synchronises: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dispatch and compute of the phases, the binding resource scaled so that the step takes the measured period.

    The device binds where its work fills the period, or is far more than the CPU's.  The other resource is cut: longer than the
    period it cannot have taken.

    Where the step synchronises, CPU and device begin it level, and it takes as long as its longest chain: all dispatch and then the
    optimizer's compute, or the forward's dispatch and then all compute behind it, or all compute.  The device binds where the last
    of these is the longest.
    """
    issued, computed = sum(dispatch), sum(compute)
    if not synchronises:
        if computed >= _FILLS * period_ns or issued < _FAR_LESS * computed:
            return _scaled(dispatch, min(issued, period_ns)), _scaled(compute, period_ns)
        return _scaled(dispatch, period_ns), _scaled(compute, min(computed, period_ns))
    device_binds = computed >= max(issued + compute[-1], dispatch[0] + sum(compute[1:]))
    compute = _scaled(compute, period_ns if device_binds else min(computed, period_ns))
    # The same share of what each chain leaves for dispatch; the forward's is dispatch[0] of issued.
    left = min(period_ns - compute[-1], (period_ns - sum(compute[1:])) * issued // max(1, dispatch[0]))
    return _scaled(dispatch, min(issued, left) if device_binds else left), compute


def _scaled(times: Sequence[int], total: int) -> tuple[int, ...]:
    return tuple(ns * total // max(1, sum(times)) for ns in times)
