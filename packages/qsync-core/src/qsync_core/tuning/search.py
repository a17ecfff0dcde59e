"""Tuning: trying a backend's configurations, best guesses first, and keeping every measurement.

The search is successive halving (Jamieson and Talwalkar, AISTATS 2016): every candidate is measured briefly, the better ones again
with more samples, and the best few thoroughly.  It stops early where a configuration is so near to a lower bound that none can win.
"""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Kernel, KernelBackend, KernelConfig, KernelRequest
from qsync_core.tuning.record import Measurement, TuningKey, TuningRecord
from qsync_core.tuning.store import TuningStore


class Measure(Protocol):
    """Runs a kernel on operands of the request's shapes (qsync-torch has one)."""

    def __call__(self, kernel: Kernel, request: KernelRequest, samples: int) -> int:
        """The median latency of ``samples`` runs in nanoseconds.

        Raises:
            BackendError: when the kernel does not run.
            DeviceLostError: when nothing runs after it.
        """
        ...


class DeviceLostError(BackendError):
    """A kernel left the device unusable for this process; its configuration is recorded as failed, and tuning must start again."""


class NothingRunsError(BackendError):
    """No configuration runs; ``failures`` says of each that was tried why."""

    def __init__(self, message: str, failures: Mapping[str, str]) -> None:
        super().__init__(message)
        self.failures = failures


@attrs.frozen
class Effort:
    """How much to try.

    Attributes:
        budget: configurations that are tried for a request, from the head of the backend's list.
        samples: runs per configuration in each round; survivors go on to the next.
        keep: share of the configurations that survives a round, at least two.
        kernels: how many kernels are compiled for requests that can share them, where a backend compiles and a whole job is tuned.
        first_guesses, hopeless: a backend whose first so many candidates that run are all slower than another backend's best by
            more than this factor is not tried further.
        near: a latency within this factor of the lower bound ends the search.
    """

    budget: int = 24
    kernels: int = 4
    samples: tuple[int, ...] = (3, 9, 25)
    keep: float = 1 / 3
    first_guesses: int = 4
    hopeless: float = 1.3
    near: float = 1.05


def tune(
    backend: KernelBackend,
    request: KernelRequest,
    measure: Measure,
    store: TuningStore,
    *,
    effort: Effort = Effort(),
    lower_bound_ns: int = 0,
    rival_ns: int = 0,
    valid: Collection[str] | None = None,
    in_time: Callable[[], bool] = lambda: True,
    problem_of: Callable[[Kernel], str] = lambda kernel: "",
) -> TuningRecord:
    """Find the fastest configuration; the earlier candidate wins a tie.

    Every measurement goes to the store at once, and what is there already is not measured again: an interrupted search continues,
    and a finished one with the same or a larger budget returns its record.  A failure that may pass (a full disk, too little
    memory, a compiler that is missing or was killed) is not kept: the search goes on without that configuration, and the next one
    tries it again.

    Args:
        store: where measurements and the record go.
        lower_bound_ns: no kernel is faster (:func:`qsync_core.kernels.roofline.lower_bound_ns`); 0 if unknown.
        rival_ns: what another backend takes for the request; 0 if unknown.
        valid: configurations that the backend knows for the request, where it is asked for fewer; None: its candidates.  A record
            with another one (of a file from elsewhere) counts as none.
        in_time: asked before each configuration that may have to be compiled, once one has run; when it says no, the best of those
            that were tried is taken, and the next search tries the others.
        problem_of: says what is wrong with what a kernel computes, empty where nothing is; it is asked of the fastest, which fails
            where it is wrong.

    Raises:
        NothingRunsError: when no configuration runs; with the reason of each.
        BackendError: when the backend does not support the request.
        DeviceLostError: when a kernel broke the device for this process.
    """
    what = f"{request.op} in {request.variant.label} of shapes {list(request.shapes)}"
    if reasons := backend.unsupported_reasons(request):
        raise BackendError(f"backend {backend.name} cannot run {what}: {'; '.join(reasons)}")
    offered = list(backend.candidate_configs(request))
    candidates = offered[: max(1, effort.budget)]
    known = store.find(backend.name, request, [config.text for config in offered] if valid is None else valid)
    if known is not None and known.tried >= len(candidates):
        return known
    search = _Search(backend, request, measure, store)
    alive, left = candidates, 0
    enough = effort.near * lower_bound_ns
    # One candidate is compared with other backends only.
    rounds = effort.samples if len(candidates) > 1 else effort.samples[:2]
    for position, samples in enumerate(rounds):
        for number, config in enumerate(alive, start=1):
            if not position and not search.knows(config) and search.ranked(alive[: number - 1]) and not in_time():
                left = len(alive) - number + 1
                break
            found = search.result(config, samples)
            if position:
                continue
            if not found.failure and found.latency_ns <= enough:
                break
            ran = search.ranked(alive[:number])
            if rival_ns and len(ran) >= effort.first_guesses and search.latency_ns(ran[0]) > effort.hopeless * rival_ns:
                break
        alive = search.ranked([config for config in candidates if config in alive])
        if position + 1 < len(rounds):
            alive = alive[: max(2, math.ceil(len(alive) * effort.keep))]
    while alive and not search.is_right(alive[0], problem_of):
        alive = search.ranked(candidates)
    if not alive:
        said = "; ".join(f"{config or 'default'}: {why}" for config, why in search.failures().items())
        again = "; that may pass, and the next search tries again" if search.passing else ""
        sentence = f"no configuration of backend {backend.name} runs {what}: {said or 'it offers none'}{again}"
        raise NothingRunsError(sentence, search.failures())
    best = alive[0]
    # What there was no time for, or failed for a reason that may pass, was not tried: a search of fewer than all candidates is
    # taken up again.
    tried = len(candidates) - len(search.passing) - left
    record = TuningRecord(search.key, best.text, search.latency_ns(best), tried)
    store.add(record)
    return record


@attrs.define
class _Search:
    """The measurements of one request by one backend; kernels are built once."""

    backend: KernelBackend
    request: KernelRequest
    measure: Measure
    store: TuningStore
    key: TuningKey = attrs.field(init=False)
    passing: set[str] = attrs.field(factory=set, init=False)
    """Configurations that failed for a reason that may pass."""
    _found: dict[str, Measurement] = attrs.field(init=False)
    _kernels: dict[str, Kernel] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.key = self.store.key(self.backend.name, self.request)
        self._found = self.store.measured(self.backend.name, self.request)

    def result(self, config: KernelConfig, samples: int) -> Measurement:
        """The measurement of a configuration over at least so many samples, the kept one if there is one."""
        found = self._found.get(config.text)
        if found is not None and (found.failure or found.samples >= samples):
            return found
        return self._tried(config, lambda kernel: Measurement(self.measure(kernel, self.request, samples), samples))

    def is_right(self, config: KernelConfig, problem_of: Callable[[Kernel], str]) -> bool:
        """Whether a kernel that was measured computes what it should; one that does not has failed."""
        measured = self._found[config.text]

        def look(kernel: Kernel) -> Measurement:
            problem = problem_of(kernel)
            return Measurement(failure=f"it is wrong: {problem}") if problem else measured

        return not self._tried(config, look).failure

    def _tried(self, config: KernelConfig, run: Callable[[Kernel], Measurement]) -> Measurement:
        try:
            if config.text not in self._kernels:
                self._kernels[config.text] = self.backend.build(self.request, config)
            found = run(self._kernels[config.text])
        except (Exception, SystemExit) as error:  # a kernel of a plugin: whatever it raises must not stop the others
            said = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
            found = Measurement(failure=" ".join(said.split())[:1000] or type(error).__name__)
            if is_temporary(error) and not isinstance(error, DeviceLostError):
                self.passing.add(config.text)
                self._found[config.text] = found
                return found
            self._keep(config, found)
            if isinstance(error, DeviceLostError):
                raise
            return found
        self._keep(config, found)
        return found

    def knows(self, config: KernelConfig) -> bool:
        """Whether a configuration was measured before."""
        return config.text in self._found

    def failures(self) -> dict[str, str]:
        """Why configurations do not run."""
        return {config: found.failure for config, found in self._found.items() if found.failure}

    def _keep(self, config: KernelConfig, found: Measurement) -> None:
        self._found[config.text] = found
        self.store.add_measurement(self.key, config.text, found)

    def latency_ns(self, config: KernelConfig) -> int:
        """What a configuration takes that was measured and runs."""
        return self._found[config.text].latency_ns

    def ranked(self, configs: Sequence[KernelConfig]) -> list[KernelConfig]:
        """List the configurations that were measured and run, the fastest first; of equal ones the earlier."""
        ran = [c for c in configs if (found := self._found.get(c.text)) is not None and not found.failure]
        return sorted(ran, key=self.latency_ns)


_PASSING = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_COMPILERS = ("cc", "gcc", "clang", "nvcc")
_SAID = re.compile(
    "|".join(
        [
            # What a compiler prints, whose output is all that is left of its error.
            *(re.escape(os.strerror(number)) for number in _PASSING),
            "Failed to find C compiler",  # Triton, without one to build its launchers
            "CUDA error: out of memory",
            "CUDA out of memory",
            "killed by signal",
            "died due to signal",
            "one of its steps was killed",
        ]
    )
)


def is_temporary(error: BaseException) -> bool:
    """Whether a failure comes of what the machine lacked at that moment.

    That is, anywhere in the chain of errors: a full disk or quota, too little memory of the machine or the device, a compiler that
    is missing or was killed by a signal.  Errors are also known by their text, because a backend reports what its compiler printed.
    """
    return any(_is_passing(one) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it; also one that ``raise … from None`` keeps from being shown."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError):
        missing = str(error.filename or "")
        return missing != "" and (missing == os.environ.get("CC") or os.path.basename(missing) in _COMPILERS)
    if isinstance(error, OSError):
        return error.errno in _PASSING
    # torch.OutOfMemoryError; torch itself is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
        return True
    return _SAID.search(str(error)) is not None
