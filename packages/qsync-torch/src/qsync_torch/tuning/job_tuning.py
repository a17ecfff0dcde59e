"""Tuning exactly the kernels that a traced job needs: each distinct one once, for every backend that takes it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import torch

from qsync_core.errors import BackendError, QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.kernels.backend import CompilingBackend, KernelBackend, KernelRequest
from qsync_core.kernels.choice import QUANTIZE_WEIGHT, KernelChoice
from qsync_core.kernels.requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.kernels.roofline import lower_bound_ns, operations, read_bytes
from qsync_core.progress import ProgressCallback, silent
from qsync_core.tuning.record import TuningRecord
from qsync_core.tuning.search import DeviceLostError, Effort, NothingRunsError, tune
from qsync_core.tuning.store import TuningStore
from qsync_torch.devices import device_facts
from qsync_torch.kernels.canary import problem_of_kernel
from qsync_torch.kernels.installed import open_store
from qsync_torch.kernels.selection import AUTO, find_backends
from qsync_torch.tuning.compiling import BackgroundCompiler, Group, LimitedBackend, build_all, group_of, kernel_of
from qsync_torch.tuning.kernel_timing import KernelTimer, device_peaks, rotating_sets

DEFAULT_EFFORT = Effort()
TUNING_S = 90.0
"""How long a job's kernels are tuned where no more is asked for: ``qsync profile`` and ``qsync prepare``."""
_OPERATIONS_PER_BYTE = 400
"""8-bit operations in the time of one byte of memory; T4, A100 and H200 have 400 to 420."""


@attrs.frozen
class TunedRequest:
    """One kernel of a job: who can run it how fast, and why others cannot; of those that take it and fail also each failure."""

    asked: OperatorRequest
    records: tuple[TuningRecord, ...]
    refusals: dict[str, tuple[str, ...]] = attrs.field(hash=False)
    failures: dict[str, tuple[str, ...]] = attrs.field(hash=False)

    @property
    def best(self) -> TuningRecord | None:
        """The fastest."""
        return min(self.records, key=lambda record: (record.latency_ns, record.key.backend), default=None)


@attrs.frozen
class JobTuning:
    """What tuning a job gave: one entry a distinct kernel, how many searches were there already, and the seconds it took."""

    requests: tuple[TunedRequest, ...]
    reused: int
    seconds: float


def distinct_requests(
    dag: PrecisionDag, ladder: Sequence[Variant], device_kind: str, compute_capability: str
) -> list[OperatorRequest]:
    """Every kernel that the graph's adjustable operators need in the 8-bit rungs of a ladder, each once, the most work first.

    Float rungs run PyTorch's own kernels, of which there is nothing to tune.
    """
    found: dict[tuple[object, ...], OperatorRequest] = {}
    work: Counter[tuple[object, ...]] = Counter()
    calls = {(operator.cost_key, operator.no_grad_inputs): CallShapes.of(operator) for operator in dag.adjustable}
    uses = Counter((operator.cost_key, operator.no_grad_inputs) for operator in dag.adjustable)
    for variant in ladder_under(dag.base, ladder)[0]:
        if variant.compute.needs_scale:
            for name, call in calls.items():
                for asked in operator_requests(call, variant, device_kind, compute_capability):
                    key = (group_of(asked.request), asked.request.shapes)
                    found.setdefault(key, asked)
                    work[key] += uses[name] * (operations(asked) + _OPERATIONS_PER_BYTE * read_bytes(asked))
    return [found[key] for key, _ in work.most_common()]


def tune_job(
    dag: PrecisionDag,
    ladder: Sequence[Variant],
    device: torch.device,
    *,
    tuning: Path | None = None,
    seconds: float = TUNING_S,
    progress: ProgressCallback = silent,
) -> TuningStore | None:
    """Tune what a job needs on a GPU within a budget, with every installed backend; on a CPU, PyTorch's own kernels run.

    Args:
        dag, ladder: the job, and the variants that a plan may use.
        device: where.
        tuning: file of tuning records; :func:`qsync_core.tuning.store.default_store_path` by default.
        seconds: no search begins later, and none goes on; what has been found before takes none.
        progress: receives the state before each search.

    Returns:
        The records; None where there is nothing to tune.

    Raises:
        DeviceLostError: when a kernel broke the device for this process; run again to continue.
    """
    requests = distinct_requests(dag, ladder, *device_facts(device)) if device.type == "cuda" and seconds > 0 else []
    if not requests:
        return None
    store = open_store(device, tuning)
    tune_requests(requests, list(find_backends(AUTO)), store, device, seconds=seconds, progress=progress)
    return store


def tune_requests(
    requests: Sequence[OperatorRequest],
    backends: Sequence[KernelBackend],
    store: TuningStore,
    device: torch.device,
    *,
    effort: Effort = DEFAULT_EFFORT,
    seconds: float = math.inf,
    progress: ProgressCallback = silent,
) -> JobTuning:
    """Tune requests on a device with every backend that takes them.

    Args:
        requests: what is to run; those that matter most first.
        backends: who is asked.
        store: where records go; finished searches in it are not repeated, interrupted ones continue.
        device: where.
        effort: how much to try.
        seconds: no search begins later, and one that has begun tries no further configuration; compilers that run then are ended
            where the backend can (:class:`~qsync_core.kernels.backend.InterruptibleBackend`), and no kernel is begun that would not
            be done in time by what the longest took.
        progress: receives the state before each search.

    Raises:
        DeviceLostError: when a kernel broke the device for this process; run again to continue.
    """
    start = time.monotonic()
    device_peaks(device)  # measured while nothing compiles
    reused, done = 0, 0
    tunings: dict[int, _RequestTuning] = {}
    left = list(range(len(requests)))
    total = len(requests) * len(backends)
    with BackgroundCompiler(backends, requests, effort.kernels, start + seconds) as compiler:
        while left and time.monotonic() - start < seconds:
            index = compiler.ready(left)
            is_ready = index is not None
            if index is None:  # meanwhile the other backends' kernels are measured
                index = next((one for one in left if one not in tunings), None)
            if index is None:
                compiler.wait(left, partial(_report_compiling, progress, done, total))
                continue
            request = tunings.setdefault(index, _RequestTuning(requests[index], device, store, effort, start + seconds))
            for backend in compiler.backends:
                waits = isinstance(backend, LimitedBackend)
                if backend.name in request.asked_of or (waits and not is_ready):
                    continue
                progress(done, total, f"{backend.name}: {describe(requests[index])}")
                done += 1
                request.asked_of.add(backend.name)
                if not waits or compiler.has_built(index):
                    reused += request.tune(backend)
            request.release()
            if is_ready:
                left.remove(index)
    progress(total, total, "")
    found = tuple(tunings[index].tuned for index in sorted(tunings))
    return JobTuning(found, reused, time.monotonic() - start)


def _report_compiling(progress: ProgressCallback, done: int, total: int, built: int, every: int) -> None:
    progress(done, total, f"compiling: {built} of {every} kernels")


@attrs.define(eq=False)
class _RequestTuning:
    """Tunes one request with one backend after the other; ``until`` when, by ``time.monotonic``."""

    asked: OperatorRequest
    device: torch.device
    store: TuningStore
    effort: Effort
    until: float = math.inf
    records: list[TuningRecord] = attrs.field(factory=list)
    refusals: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    failures: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    asked_of: set[str] = attrs.field(factory=set)
    _timer: KernelTimer | None = None

    @property
    def tuned(self) -> TunedRequest:
        """What has been found."""
        return TunedRequest(self.asked, tuple(self.records), self.refusals, self.failures)

    def release(self) -> None:
        """Free the operands: other requests have their own."""
        self._timer = None

    def tune(self, backend: KernelBackend) -> bool:
        """Add a backend's record, or why it has none; returns whether its search was finished before.

        Raises:
            DeviceLostError: when a kernel broke the device for this process.
        """
        request = self.asked.request
        try:
            if reasons := backend.unsupported_reasons(request):
                self.refusals[backend.name] = tuple(reasons)
                return False
            valid = _known_configs(backend, request)
            known = self.store.find(backend.name, request, valid)
            if known is not None and known.tried >= min(self.effort.budget, len(backend.candidate_configs(request))):
                self.records.append(known)
                return True
            if self._timer is None:
                self._timer = KernelTimer(rotating_sets(self.asked, self.device), self.device)
            bound = lower_bound_ns(self.asked, device_peaks(self.device))
            rival = min((record.latency_ns for record in self.records), default=0)
            limits = {"lower_bound_ns": bound, "rival_ns": rival}
            record = tune(
                backend,
                request,
                self._timer,
                self.store,
                effort=self.effort,
                valid=valid,
                in_time=lambda: time.monotonic() < self.until,
                problem_of=lambda kernel: problem_of_kernel(self.asked, kernel, self.device),
                **limits,
            )
        except DeviceLostError:
            raise
        except (BackendError, torch.OutOfMemoryError) as error:
            self.refusals[backend.name] = (" ".join(str(error).split()),)
            if isinstance(error, NothingRunsError):
                self.failures[backend.name] = tuple(dict.fromkeys(error.failures.values()))
            return False
        self.records.append(record)
        return False


def _known_configs(backend: KernelBackend, request: KernelRequest) -> frozenset[str]:
    every = backend.known_configs(request) if isinstance(backend, LimitedBackend) else backend.candidate_configs(request)
    return frozenset(config.text for config in every)


@attrs.frozen
class CompiledAhead:
    """What a backend compiled: for how many requests, and how many kernels those share (None: it does not say)."""

    requests: int
    kernels: int | None = None


def compile_requests(
    requests: Iterable[OperatorRequest], backends: Iterable[KernelBackend], arch: str, progress: ProgressCallback
) -> dict[str, CompiledAhead]:
    """Let every backend that can compile ahead do so for the requests it takes.

    Args:
        requests: what is going to run.
        backends: who is asked.
        arch: the chip (``sm_90a``).
        progress: receives how many kernels of a backend are done.

    Returns:
        What each backend compiled, by its name; those that take none of the requests are left out.

    Raises:
        BackendError: when a compiler is missing, or a kernel does not compile.
    """
    done: dict[str, CompiledAhead] = {}
    asked = [entry.request for entry in requests]
    for backend in backends:
        if not isinstance(backend, CompilingBackend):
            continue
        taken = [request for request in asked if not backend.unsupported_reasons(request)]
        if not taken:
            continue
        library = backend.compile_ahead(
            taken, arch, lambda n, total, what, name=backend.name: progress(n, total, f"{name}: {what}")
        )
        kernels = getattr(library, "kernels", None)
        done[backend.name] = CompiledAhead(len(taken), kernels if isinstance(kernels, int) else None)
    return done


def compile_planned(
    dag: PrecisionDag, assignments: Mapping[OpId, Assignment], device: torch.device, progress: ProgressCallback = silent
) -> None:
    """Compile on this machine what the planned kernels of a group need, side by side; what does not compile says so in training.

    Args:
        dag: the job.
        assignments: what its adjustable operators run as.
        device: where they will.
        progress: receives how many kernels are compiled.
    """
    wanted: dict[Group, tuple[KernelBackend, KernelRequest, str]] = {}
    for operator in dag.adjustable:
        entry = assignments[operator.op_id]
        if device.type != "cuda" or not entry.variant.compute.needs_scale:
            continue
        choice = KernelChoice.parse(entry.backend, entry.config)
        for asked in operator_requests(CallShapes.of(operator), entry.variant, *device_facts(device)):
            pinned = choice.of(asked.role)
            (backend,) = find_backends((pinned.backend,)) if pinned is not None and pinned.config else (None,)
            if pinned is not None and isinstance(backend, CompilingBackend):
                kernel = (pinned.backend, group_of(asked.request), kernel_of(pinned.config))
                wanted.setdefault(kernel, (backend, asked.request, pinned.config))
    build_all(wanted, lambda built, every: progress(built, every, f"{every} kernels"))


def capability_of(arch: str) -> str:
    """The compute capability of an architecture's name: ``7.5`` for ``sm_75``.

    Raises:
        QSyncError: when the name is not of that form.
    """
    digits = arch.removeprefix("sm_").rstrip("a")
    if not arch.startswith("sm_") or not digits.isdecimal() or len(digits) < 2:
        raise QSyncError(f"--arch names a chip as compilers do, for example sm_75 or sm_90a, got {arch!r}")
    return f"{digits[:-1]}.{digits[-1]}"


def describe(asked: OperatorRequest) -> str:
    """A request in a few words: ``linear.output int8 512×768 768×768``."""
    shapes = " ".join("×".join(map(str, shape)) for shape in asked.request.shapes)
    op = "quantize weight" if asked.role == QUANTIZE_WEIGHT else asked.role
    return f"{op} {asked.request.variant.label} {shapes}"
