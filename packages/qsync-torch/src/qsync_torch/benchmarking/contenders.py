"""Who can run a problem: backends with their best configuration, and PyTorch's own product in 16 bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelBackend, KernelConfig, KernelRequest
from qsync_torch.benchmarking.limited_backend import LimitedBackend
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.race import Thunk, race, why_failed
from qsync_torch.benchmarking.shapes import ProductShape
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.installed import installed
from qsync_torch.kernels.operands import REPLACED, Arguments, memory_of
from qsync_torch.kernels.selection import AUTO, find_backends
from qsync_torch.kinds.products import product, product_gradients
from qsync_torch.tuning.compiling import Group, build_all, kernel_of


@attrs.frozen(eq=False)
class Contender:
    """A kernel ready to be timed.

    Attributes:
        name: of the backend.
        config: its configuration.
        thunks: calls on rotating operands.
        problem: what it computes, in its own formats.
        operands: of the first call.
    """

    name: str
    config: str
    thunks: tuple[Thunk, ...]
    problem: Problem
    operands: Arguments


class Backends:
    """Kernel backends by name, each with its best guesses only (see :class:`LimitedBackend`).

    Raises:
        BackendError: when one of the chain is not installed, naming those that are.
    """

    def __init__(self, libraries: int = 2, just_in_time: int = 3, chain: tuple[str, ...] = AUTO) -> None:
        self.by_name = {one.name: LimitedBackend(one, libraries, just_in_time) for one in find_backends(chain)}
        self.disabled = dict(installed().disabled)

    def reasons(self, name: str, request: KernelRequest) -> list[str]:
        """Why a backend cannot run a request; empty when it can."""
        return self.by_name[name].unsupported_reasons(request)

    def accepting(
        self, problem: Problem, operands: Sequence[Arguments], device: torch.device
    ) -> tuple[list[Contender], dict[str, str]]:
        """Contenders of the backends that run a problem, and why the others do not."""
        found, left_out = [], {}
        for name in self.by_name:
            try:
                found.append(self.contender(name, problem, operands, device))
            except Exception as error:  # what one backend cannot build another may
                left_out[name] = str(error) if isinstance(error, RefusedError) else f"failed: {why_failed(error)}"
        return found, left_out

    def contender(self, name: str, problem: Problem, operands: Sequence[Arguments], device: torch.device) -> Contender:
        """A backend's fastest candidate, on tensors of its own in the operands' memory: what it replaces is replaced for no other.

        Raises:
            RefusedError: with its reasons, when it does not run the problem.
            Exception: whatever building or running it raises.
        """
        request = problem.request(device)
        if reasons := self.reasons(name, request):
            raise RefusedError("; ".join(reasons))
        own = [tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in one) for one in operands]
        config, thunks = build_best(self.by_name[name], request, own, device)
        if [memory_of(one) for one in own] != [memory_of(one) for one in operands]:  # by the race of its configurations
            raise BackendError(REPLACED)
        return Contender(name, config, thunks, problem, own[0])


class RefusedError(Exception):
    """A contender does not run a problem, and says why."""


def in_16_bit(problem: Problem, precision: Precision, device: torch.device) -> Contender:
    """PyTorch's own product in a 16-bit format, of operands in that format; images are channels-last.

    Raises:
        RefusedError: for a quantization, which 16 bit does not need.
    """
    if not isinstance(problem.shape, ProductShape):
        raise RefusedError("16 bit needs no quantization")
    alike = attrs.evolve(problem, variant=Variant.of(precision), bell_shaped=False)
    call, dtype = problem.shape.call, TORCH_DTYPE[precision]
    geometry = None if call.of_rows else call.geometry
    thunks, sets = [], alike.operands(device)
    for number, arguments in enumerate(sets):
        first, second = arguments[0], arguments[2 if problem.part == "output" else 1]
        if problem.part == "output":
            bias = arguments[4] if arguments[4] is None else arguments[4].to(dtype)
            sets[number] = (*arguments[:4], bias, *arguments[5:])
            thunks.append(partial(product, first, second, bias, geometry))
            continue
        other = arguments[3].to(dtype)  # in the shape of the result, which nothing reads
        by_x = problem.part == "grad_input"
        x, w = (other, second) if by_x else (second, other)
        thunks.append(partial(_gradient, first, x, w, geometry, by_x))
    return Contender(str(precision), "", tuple(thunks), alike, sets[0])


def _gradient(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, geometry: Any, by_x: bool) -> torch.Tensor:
    found: torch.Tensor = product_gradients(grad, x, w, geometry, by_x, not by_x)[0 if by_x else 1]
    return found


def build_best(
    backend: KernelBackend, request: KernelRequest, operands: Sequence[Arguments], device: torch.device
) -> tuple[str, tuple[Thunk, ...]]:
    """The configuration and the calls of a backend's fastest candidate, by a short race.

    Raises:
        Exception: what building raised, when no configuration could be built.
        BackendError: when none could run.
    """
    built: dict[str, tuple[Thunk, ...]] = {}
    problem_with: Exception | None = None
    for config in backend.candidate_configs(request):
        try:
            built[config.text] = calls_of(backend, request, config, operands)
        except Exception as error:
            problem_with = error
    if not built and problem_with is not None:
        raise problem_with
    text = next(iter(built))
    if len(built) > 1:
        measured, failures = race(built, device, rounds=5, budget_s=0.3)
        if not measured:
            raise BackendError("; ".join(f"{config or 'default'}: {why}" for config, why in failures.items()))
        text = min(measured, key=lambda name: measured[name].median_ns)
    return text, built[text]


def calls_of(
    backend: KernelBackend, request: KernelRequest, config: KernelConfig, operands: Sequence[Arguments]
) -> tuple[Thunk, ...]:
    """The backend's kernel bound to each set of operands."""
    kernel: Any = backend.build(request, config)
    return tuple(partial(kernel, *arguments) for arguments in operands)


def compile_ahead(backends: Backends, requests: Iterable[KernelRequest]) -> None:
    """Build the candidates of backends that compile, for all requests at once."""
    compiling = {name: backend for name, backend in backends.by_name.items() if backend.compiles}
    build_side_by_side(
        [
            (backend, request, config)
            for request in requests
            for name, backend in compiling.items()
            if not backends.reasons(name, request)
            for config in backend.candidate_configs(request)
        ]
    )


def build_side_by_side(todo: Sequence[tuple[KernelBackend, KernelRequest, KernelConfig]]) -> None:
    """Build kernels on all cores; what cannot be built is left to whoever needs it.

    Threads that want one library wait for each other, so that each library is built once before any is asked for again.
    """
    first: dict[Group, tuple[KernelBackend, KernelRequest, str]] = {}
    by_request: dict[Group, tuple[KernelBackend, KernelRequest, str]] = {}
    for backend, request, config in todo:
        library = kernel_of(config.text)
        first.setdefault((backend.name, request.op, str(request.variant), library), (backend, request, config.text))
        by_request.setdefault((backend.name, request, library), (backend, request, config.text))
    for wanted in (first, by_request):
        build_all(wanted, lambda built, every: None)
