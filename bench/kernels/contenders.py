"""Who can run a problem: the installed backends, through the registry, with their best configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.kernels.backend import KernelBackend, KernelConfig, KernelRequest
from qsync_core.plugins.registry import Registry

from .limited_backend import LimitedBackend, library_of
from .problems import Operands, Problem
from .timing import Thunk, race, rotation_count, tensor_bytes


@attrs.frozen
class Contender:
    """A kernel ready to be timed.

    Attributes:
        name: of the backend.
        config: its configuration.
        thunks: calls on rotating operands.
    """

    name: str
    config: str
    thunks: tuple[Thunk, ...]


class Backends:
    """Every installed kernel backend by name, each with its best guesses only (see :class:`LimitedBackend`)."""

    def __init__(self, libraries: int = 2, just_in_time: int = 3) -> None:
        registry = Registry.load()
        self.by_name = {backend.name: LimitedBackend(backend, libraries, just_in_time) for backend in registry.backends()}
        self.disabled = dict(registry.disabled)

    def reasons(self, name: str, request: KernelRequest) -> list[str]:
        """Why a backend cannot run a request; empty when it can."""
        return self.by_name[name].unsupported_reasons(request)

    def accepting(self, request: KernelRequest) -> list[str]:
        """Names of the backends that can run a request."""
        return [name for name in self.by_name if not self.reasons(name, request)]


def rotating_operands(problem: Problem, device: torch.device) -> list[Operands]:
    """Sets of operands, together larger than the L2 cache."""
    first = problem.operands(device, 0)
    return [first, *(problem.operands(device, seed) for seed in range(1, rotation_count(tensor_bytes(first), device)))]


def build_best(backend: KernelBackend, request: KernelRequest, operands: Sequence[Operands], device: torch.device) -> Contender:
    """The backend's fastest candidate, by a short race.

    Raises:
        BackendError: what building raised, when no configuration could be built.
        RuntimeError: when none could run.
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
    if len(built) == 1:
        text = next(iter(built))
    else:
        measured, failures = race(built, device, rounds=5, budget_s=0.3)
        if not measured:
            raise RuntimeError("; ".join(f"{config or 'default'}: {why}" for config, why in failures.items()))
        text = min(measured, key=lambda name: measured[name].median_ns)
    return Contender(backend.name, text, built[text])


def calls_of(
    backend: KernelBackend, request: KernelRequest, config: KernelConfig, operands: Sequence[Operands]
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
    first: dict[tuple[str, str, str, str], tuple[KernelBackend, KernelRequest, KernelConfig]] = {}
    by_request: dict[tuple[str, KernelRequest, str], tuple[KernelBackend, KernelRequest, KernelConfig]] = {}
    for item in todo:
        backend, request, config = item
        library = library_of(config)
        first.setdefault((backend.name, request.op, str(request.variant), library), item)
        by_request.setdefault((backend.name, request, library), item)

    def build(item: tuple[KernelBackend, KernelRequest, KernelConfig]) -> None:
        backend, request, config = item
        with contextlib.suppress(Exception):
            backend.build(request, config)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, first.values()))
        list(pool.map(build, by_request.values()))
