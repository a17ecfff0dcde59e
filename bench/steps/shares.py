"""What a plan makes of a share of the memory: planned from one profile of the device with chains, then run under a cap."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import torch

import qsync_torch as qsync
from kernels.bench import Bench
from kernels.job_kernels import EFFORT
from kernels.whole_model import Setting, WholeModel, release, time_in_turns
from qsync_core.artifacts.files import load, save
from qsync_core.errors import InfeasibleError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import split_chain
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.indicate import indicate
from qsync_planner.replayer.replay import Replayer, group_variants
from qsync_torch.devices import device_facts
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.installed import open_store
from qsync_torch.kernels.selection import find_backends
from qsync_torch.load_job import load_job
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.memory import memory_rise
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.job_tuning import distinct_requests, tune_requests

from .jobs import StepJob
from .rows_shares import ModelFound, Ran, ShareFound, next_batch

T = TypeVar("T")
STRONG, WEAK = "strong", "weak"
FLOAT32 = Variant.of(Precision.FLOAT32)
LINK = Link((STRONG, WEAK), 20_000, 0.04)
"""20 µs and 25 GB/s between the two devices."""
EFFORTS = Efforts(
    operators=Effort(min_repeats=3, max_repeats=15, budget_s=0.1),
    casts=Effort(min_repeats=3, max_repeats=10, budget_s=0.03),
    steps=Effort(min_repeats=2, max_repeats=10, target=0.01, budget_s=0.5, warmup=0),
)
"""A third of what ``qsync profile`` takes: whole steps correct what single operators are off by."""
OBSERVED = {"warmup": 2, "steps": 2}
"""Updates; enough for an order of operators by Ω, which is all that is asked for here."""
PLAN_S = 10.0
"""After which the solver hands over the best plan that it has."""
WARM_UP = 3
TINY = {
    "resnet50": "resnet18:image=16,width=4,classes=10,small_stem=true,channels_last=true",
    "bert-base": "bert-base:seq=64,layers=1,hidden=32,heads=2,vocab=99",
}
TINY_BATCH = 32
"""What stands for the jobs where the script is tried on a CPU: their activations outweigh their weights."""
PLANNED = Setting("planned")
"""The model is prepared as a plan says, and runs without autocast."""


@attrs.frozen
class Measuring:
    """How a job is measured.

    Attributes:
        bench: the device.
        out: folder in which its graph, profile and sensitivity are kept, and found again by a later run; None for none.
        kernels: backends of the 8-bit operators and chains; ``a+b`` takes b for what a does not offer, ``auto`` the fastest tuned.
        tune_s: seconds of tuning before the profile; 0 for none.
        compiler: what ``qsync.compile`` compiles the rest with.
        probes: batches to try, at most, for each share.
    """

    bench: Bench
    out: Path | None
    kernels: str
    tune_s: float
    compiler: str
    probes: int

    @property
    def ladder(self) -> tuple[Variant, ...]:
        """int8 with 16-bit results, 16 bit, float32; a CPU's 16 bit is bfloat16."""
        sixteen = Precision.FLOAT16 if self.bench.device.type == "cuda" else Precision.BFLOAT16
        return (Variant.of(Precision.INT8, sixteen_bit=sixteen, output=sixteen), Variant.of(sixteen), FLOAT32)


@attrs.frozen
class Measured:
    """What plans of a job are made from."""

    dag: PrecisionDag
    profile: Profile
    sensitivity: Sensitivity


class JobShares:
    """One job on one device: its inputs to planning, made once, and what plans for shares of its memory are worth."""

    def __init__(self, how: Measuring, job: StepJob) -> None:
        self.how, self.job, self.bench = how, job, how.bench
        self.text, self.batch = (TINY[job.name], TINY_BATCH) if how.bench.quick else (job.text, job.batch)
        self.device = how.bench.device
        self.inputs = self._made()
        profiles = {STRONG: self.inputs.profile, WEAK: self.inputs.profile}
        self.profiles = profiles
        self.replayer = Replayer(Inputs(self.inputs.dag, self.cluster(), profiles))
        alone = Cluster("alone", (self.cluster().group(WEAK),))
        self.alone = Replayer(Inputs(self.inputs.dag, alone, {WEAK: self.inputs.profile}))

    def cluster(self, memory_bytes: int = 0) -> Cluster:
        """A whole device that trains in float32, and the same device again with less memory, whose operators may be lowered."""
        name = self.inputs.profile.device.name
        strong = DeviceGroup(STRONG, name, 1, Role.TRAIN, Precision.FLOAT32, (FLOAT32,))
        weak = DeviceGroup(WEAK, name, 1, Role.INFER, Precision.FLOAT32, self.how.ladder, memory_bytes)
        return Cluster("two of a kind", (strong, weak), (LINK,))

    def _made(self) -> Measured:
        folder = None if self.how.out is None else self.how.out / self.job.name
        job = load_job(self.text, self.batch)

        def kept(name: str, kind: type[T], make: Callable[[], T]) -> T:
            path = None if folder is None else folder / f"{name}.qsync"
            if path is not None and path.exists():
                return load(path, kind)
            made = make()
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                save(made, path)
            self.bench.say(f"{self.job.title}: {name}")
            return made

        dag = kept("dag", PrecisionDag, lambda: trace(job))

        def profiled() -> Profile:
            self._tune(dag)
            asked = ProfileRequest(self.device, ladder=self.how.ladder, backend=self.how.kernels, with_chains=True, efforts=EFFORTS)
            return profile(job, dag, asked, note=self.bench.say)

        def rated() -> Sensitivity:
            samples = max(2, self.batch // 4)
            collectors = [HutchinsonCollector()]
            observed = observe(
                job,
                dag,
                ObserveRequest(
                    self.how.ladder, device=self.device, batch_size=samples, collectors=collectors, settled=None, **OBSERVED
                ),
            )
            return indicate(observed, dag, self.how.ladder)

        found = kept("profile", Profile, profiled)
        release()
        return Measured(dag, found, kept("sensitivity", Sensitivity, rated))

    def _tune(self, dag: PrecisionDag) -> None:
        if self.device.type == "cpu" or self.how.tune_s <= 0:
            return
        requests = distinct_requests(dag, self.how.ladder, *device_facts(self.device))
        backends = list(find_backends(split_chain(self.how.kernels)))
        store = open_store(self.device, None)
        found = tune_requests(requests, backends, store, self.device, effort=EFFORT, seconds=self.how.tune_s)
        self.bench.say(f"{self.job.title}: tuned in {found.seconds:.0f} s")

    def measure(self, percents: Sequence[int]) -> Iterator[ModelFound]:
        """What was found so far, after each share, from the largest on; none is planned below one that no plan fits."""
        full = self.replayer.memory(WEAK).process_bytes
        amp = self.run(lambda model: model, Setting("amp", autocast=TORCH_DTYPE[self.how.ladder[1].compute]))
        self.bench.say(f"{self.job.title}, AMP in 16 bit: {amp}")
        if amp.error:
            raise RuntimeError(f"{self.job.title} does not train under AMP: {amp.error}")
        uniform = dict.fromkeys((operator.op_id for operator in self.inputs.dag.adjustable), self.how.ladder[1])
        uniform16 = self.run(lambda model: qsync.compile(qsync.apply_(model, uniform), backend=self.how.compiler))
        self.bench.say(f"{self.job.title}, uniform 16 bit: {uniform16}")
        found = ModelFound(
            self.job.name, self.job.title, self.batch, full, amp, uniform16, self.alone.replay({WEAK: uniform}).iteration_ns / 1e6
        )
        smallest = 0
        for percent in sorted(percents, reverse=True):
            budget = full * percent // 100
            share = ShareFound(percent, budget, smallest) if smallest else self._share(percent, budget, amp)
            smallest = share.smallest_bytes
            self.bench.say(f"{self.job.title}, {percent}%: {share}")
            found = attrs.evolve(found, shares=(*found.shares, share))
            yield found

    def _plan(self, memory_bytes: int) -> PrecisionPlan:
        inputs = self.inputs
        return allocate(Inputs(inputs.dag, self.cluster(memory_bytes), self.profiles, inputs.sensitivity), Request(seconds=PLAN_S))

    def _share(self, percent: int, budget_bytes: int, amp: Ran) -> ShareFound:
        try:
            plan = self._plan(budget_bytes)
        except InfeasibleError as error:
            return ShareFound(percent, budget_bytes, smallest_bytes=error.smallest_bytes)
        group = plan.group(WEAK)
        variants = group_variants(group)
        memory = self.inputs.profile.memory
        outside = 0 if memory is None else memory.outside_bytes
        found = ShareFound(
            percent, budget_bytes, operators=chosen_operators(group, self.how.ladder), chains=chosen_chains(group),
            predicted_peak_bytes=self.alone.memory(WEAK, variants).peak_bytes,
            predicted_ms=self.alone.replay({WEAK: variants}).iteration_ns / 1e6,
        )  # fmt: skip
        self.bench.say(f"{self.job.title}, {percent}%: planned, {found.operators}, chains {found.chains}")
        with self._capped(budget_bytes - outside):
            ran = self.run(lambda model: self._under(model, plan))
        found = attrs.evolve(found, run=ran)
        if not ran.error:
            found = attrs.evolve(found, peaks=self._peaks(plan, amp.peak_bytes, ran))
        return found

    def _under(self, model: torch.nn.Module, plan: PrecisionPlan) -> torch.nn.Module:
        return qsync.compile(model, plan, group=WEAK, backend=self.how.compiler, allow_flags=["batch_size"], dynamic=False)

    def _peaks(self, plan: PrecisionPlan, limit_bytes: int, ran: Ran) -> Mapping[int, int]:
        """Peaks of batches near the largest that takes no more than AMP does at the job's batch."""
        peaks = {self.batch: ran.peak_bytes}
        for _ in range(self.how.probes):
            batch = next_batch(peaks, ran.fixed_bytes, limit_bytes, self.job.granule if not self.bench.quick else 1)
            if batch in peaks or batch < 1:
                break
            tried = self.run(lambda model: self._under(model, plan), batch=batch, timed=False)
            if tried.error:
                break
            peaks[batch] = tried.peak_bytes
            self.bench.say(f"{self.job.title}: a batch of {batch} takes {tried.peak_bytes / 2**30:.3g} GiB")
        return peaks

    @contextmanager
    def _capped(self, cap_bytes: int) -> Iterator[None]:
        """PyTorch's allocator may take that much of the device."""
        if self.device.type != "cuda":
            yield
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        release()
        torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, cap_bytes / total)), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def run(
        self, prepare: Callable[[torch.nn.Module], torch.nn.Module], setting: Setting = PLANNED, *, batch: int = 0,
        timed: bool = True,
    ) -> Ran:  # fmt: skip
        """Train for some steps.

        Args:
            prepare: makes of the model what is trained.
            setting: autocast, where there is any.
            batch: samples; 0 for the job's.
            timed: measure the time of a step too.
        """
        torch._dynamo.reset()
        release()
        try:
            return self._run(prepare, setting, batch or self.batch, timed)
        except Exception as error:  # the other shares still count
            if not isinstance(error, torch.OutOfMemoryError):
                traceback.print_exc()
            return Ran(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            release()

    def _run(self, prepare: Callable[[torch.nn.Module], torch.nn.Module], setting: Setting, batch: int, timed: bool) -> Ran:
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        model = WholeModel(self.text, batch, setting, self.device, wrap=prepare)
        for _ in range(WARM_UP):
            model.step()
        peak, fixed, reserved = memory_rise(model.step, self.device)[0], 0, 0
        if cuda:
            fixed = torch.cuda.memory_allocated(self.device) - before
            peak, reserved = peak + fixed, torch.cuda.max_memory_reserved(self.device)
        blocks, each = (2, 1) if self.bench.quick else (5, 5)
        times = time_in_turns({"": model.step}, self.device, blocks=blocks, steps=each, warm_up=1)[""].blocks_ms if timed else ()
        return Ran(peak, fixed, reserved, times)


def chosen_operators(group: GroupPlan, ladder: Sequence[Variant]) -> dict[str, int]:
    """How many operators a plan runs in which variant, lowest first."""
    counts = Counter(entry.variant for entry in group.assignments.values())
    return {variant.label: counts[variant] for variant in ladder if counts[variant]}


def chosen_chains(group: GroupPlan) -> dict[str, int]:
    """How many chains a plan runs how."""
    return dict(sorted(Counter(str(entry.variant) for entry in group.chains.values()).items()))
