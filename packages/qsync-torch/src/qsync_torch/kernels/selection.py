"""Which backend runs a request: the pinned one, the first of a chain that supports it, or (``auto``) the fastest measured."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision, Rounding, Storage
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import (
    BackgroundCompilingBackend,
    CompilingBackend,
    Kernel,
    KernelBackend,
    KernelConfig,
    KernelRequest,
    Op,
    takes_offset_tensors,
)
from qsync_core.kernels.choice import AUTO_BACKEND, KernelChoice, OpChoice
from qsync_core.kernels.launches import reports_launches
from qsync_core.plugins.backends import ask_backend
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.random_bits import Offset, known_number
from qsync_torch.devices import device_facts
from qsync_torch.kernels.installed import installed, store_of_request

DEFAULT_BACKEND = AtenBackend.name
AUTO = (AUTO_BACKEND,)


def default_backend(device: torch.device) -> str:
    """The backend of operators for which none is named: ``auto`` on a GPU, where kernels differ; ``aten`` on a CPU."""
    return AUTO_BACKEND if device.type == "cuda" else DEFAULT_BACKEND


def dequantize_request(
    device: torch.device, storage: Storage, shape: tuple[int, ...], precision: Precision
) -> tuple[KernelRequest, KernelChoice]:
    """Ask for what writes a stored weight dense, and of whom: the fastest that the device has."""
    variant = attrs.evolve(Variant.plain(precision), storage=storage)
    kind, capability = device_facts(device)
    request = KernelRequest(Op.DEQUANTIZE, variant, (shape,), device_kind=kind, compute_capability=capability)
    return request, KernelChoice((default_backend(device),))


@functools.lru_cache(maxsize=64)
def find_backends(chain: tuple[str, ...]) -> tuple[KernelBackend, ...]:
    """The backends of a chain, in the order in which they are asked; of ``("auto",)``, all.

    Raises:
        BackendError: when one is not installed; the message names those that are.
    """
    if chain == AUTO:
        return tuple(installed().backends())
    return tuple(_find_backend(name) for name in chain)


def _find_backend(name: str) -> KernelBackend:
    if name == DEFAULT_BACKEND:
        return AtenBackend()
    backends = {backend.name: backend for backend in installed().backends()}
    if name not in backends:
        known = ", ".join(sorted({*backends, DEFAULT_BACKEND}))
        raise BackendError(
            installed().why_disabled(name)
            or f"kernel backend {name!r} is not installed here (found: {known}); install the package that provides it, "
            f"or name another backend{installed().all_disabled()}"
        )
    return backends[name]


def why_missing(name: str) -> str:
    """Why a backend cannot be asked at all; empty where it is installed."""
    try:
        find_backends((name,))
    except BackendError as error:
        return str(error)
    return ""


def reasons_against(request: KernelRequest, choice: KernelChoice, role: str = "") -> list[str]:
    """Why none of the backends that may run a request does, as ``backend: reason``; empty when one does.

    A pinned configuration that its backend has for no shapes is a reason too.

    Args:
        role: under which the choice has the request, where that is not its op.

    Raises:
        BackendError: when one of the backends is not installed.
    """
    chain, pinned = choice.asked_for(role or request.op)
    refusals: list[str] = []
    for backend in find_backends(chain):
        try:
            reasons = backend.unsupported_reasons(request)
        except BackendError as error:
            if chain != AUTO:  # it is named
                raise
            reasons = [str(error)]
        if not reasons:
            unknown = "" if pinned is None else _why_unknown(backend, request, pinned.config)
            return [f"{backend.name}: {unknown}"] if unknown else []
        refusals.extend(f"{backend.name}: {reason}" for reason in reasons)
    return refusals


def _why_unknown(backend: KernelBackend, request: KernelRequest, config: str) -> str:
    """Why a backend has a configuration for no shapes at all; empty where it may have it, which only compiling would tell."""
    if not config or isinstance(backend, CompilingBackend) or config in (c.text for c in backend.candidate_configs(request)):
        return ""
    try:
        backend.build(request, KernelConfig(config))
    except BackendError as error:
        return str(error) if is_for_any_sizes(error) else ""
    return ""


def is_for_any_sizes(error: BackendError) -> bool:
    """Whether an error holds for any shapes, which a backend says by its attribute ``for_any_sizes``."""
    return bool(getattr(error, "for_any_sizes", False))


def backend_of(request: KernelRequest, choice: KernelChoice) -> str:
    """The backend that runs a request; empty where none does."""
    if reasons_against(request, choice):
        return ""
    backend, config = _chosen(request, choice)
    other = stand_in(backend, request, config, choice.chain)
    return (backend if other is None else other[0]).name


def build_kernel(request: KernelRequest, choice: KernelChoice) -> Kernel:
    """Build the kernel of a request with the backend that the choice leads to, or a :func:`stand_in` while that is compiled.

    A pinned configuration that its backend refuses for the shapes at hand (a smaller last batch) gives way to the same backend's
    first candidate, with a warning; a configuration that it has for no shapes is an error.

    Raises:
        BackendError: with every backend's reasons.
    """
    backend, config = _chosen(request, choice)
    if (other := stand_in(backend, request, config, choice.chain)) is not None:
        return _build(other[0], request, other[1])
    try:
        return _build(backend, request, config)
    except BackendError as error:
        pinned = choice.of(request.op)
        if pinned is None or not pinned.config or is_for_any_sizes(error):
            raise
        first = backend.candidate_configs(request)[0]
        if first.text == config.text:
            raise
        warnings.warn(f"{error}; it runs there with {first.text or 'its default'} instead", stacklevel=2)
        return build_kernel(request, KernelChoice(choice.chain, ((request.op, OpChoice(backend.name, first.text)),)))


def _chosen(request: KernelRequest, choice: KernelChoice) -> tuple[KernelBackend, KernelConfig]:
    """The backend that a choice leads to, and its configuration.

    Raises:
        BackendError: with every backend's reasons, when none takes the request.
    """
    chain, pinned = choice.asked_for(request.op)
    if chain == AUTO:
        return installed().select(request, store=store_of_request(request))
    for backend in find_backends(chain):
        if not backend.unsupported_reasons(request):
            if pinned is not None and pinned.config:
                return backend, KernelConfig(pinned.config)
            return backend, backend.candidate_configs(request)[0]
    shapes = " and ".join(str(list(shape)) for shape in request.shapes)
    raise BackendError(
        f"{request.op} as {request.variant.label} on {shapes} cannot run on {request.device_kind}: "
        + "; ".join(reasons_against(request, choice))
    )


def stand_in(
    backend: KernelBackend, request: KernelRequest, config: KernelConfig, chain: tuple[str, ...]
) -> tuple[KernelBackend, KernelConfig] | None:
    """Who runs a kernel in this process that its backend has still to compile; None where it has not, or nobody may.

    The chain says who may: its members, or of ``auto`` every backend; never PyTorch's own kernels, a reference that is slow on a
    GPU.  The compiler is started, a warning says so once, and the process keeps the other's kernel
    (docs/decisions/compilers-beside-training.md).
    """
    if not isinstance(backend, BackgroundCompilingBackend) or _waits() or backend.is_compiled(request, config):
        return None
    others = [one for one in find_backends(chain) if one.name not in (backend.name, DEFAULT_BACKEND)]
    store = store_of_request(request)
    answers = {
        one.name: answer
        for one in others
        if not (answer := ask_backend(one, request, store)).reasons
        and (not isinstance(one, BackgroundCompilingBackend) or one.is_compiled(request, KernelConfig(answer.config)))
    }
    if not answers:
        return None
    answer = installed().choose(request, list(answers.values()))
    backend.compile_later(request, config)
    _say_once(
        f"{backend.name} has yet to compile kernels of this model for this device: until the next start {answer.backend} runs in "
        "their place, perhaps slower than predicted, while the compilers work beside the training "
        f"({WAIT_VARIABLE}=1 waits for them)"
    )
    return next(one for one in others if one.name == answer.backend), KernelConfig(answer.config)


WAIT_VARIABLE = "QSYNC_WAIT_FOR_KERNELS"
"""Environment variable: 1 has every kernel compiled before it runs; 0, as without it, lets another backend stand in."""
_awaiting = 0


@contextlib.contextmanager
def compilers_awaited() -> Iterator[None]:
    """Inside, no kernel stands in for one that is still to be compiled: what is measured is what is named."""
    global _awaiting
    _awaiting += 1
    try:
        yield
    finally:
        _awaiting -= 1


def _waits() -> bool:
    said = os.environ.get(WAIT_VARIABLE, "")
    if said not in ("", "0", "1"):
        raise BackendError(f"{WAIT_VARIABLE} is 1 (wait for compilers) or 0 (another backend stands in meanwhile), got {said!r}")
    return _awaiting > 0 or said == "1"


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


_OFFSET = {Op.QUANTIZE: 5} | {op: -1 for op in Op.PRODUCERS if op.endswith(".output")}
"""Where the kernels of an operator take the offset of their random numbers."""


_REPORTING: dict[int, Kernel] = {}
"""Kernels of backends that tell of all launches; bindings keep kernels for the life of the process."""


def reports(kernel: Kernel) -> bool:
    """Whether a kernel tells a recorder of all that it launches."""
    return id(kernel) in _REPORTING


def _build(backend: KernelBackend, request: KernelRequest, config: KernelConfig) -> Kernel:
    kernel = backend.build(request, config)
    if reports_launches(backend):
        _REPORTING[id(kernel)] = kernel
    elif backend.name != DEFAULT_BACKEND:
        kernel = functools.partial(_noted, kernel, f"raised by the kernel of {request.op} of backend {backend.name}")
    if request.device_kind == "cpu" or request.op not in _OFFSET or takes_offset_tensors(backend):
        return kernel
    return functools.partial(_with_number, kernel, backend.name, request)


def _noted(kernel: Kernel, note: str, *arguments: Any, **named: Any) -> None:
    """Call a kernel of other people, whose error says whose it is: in training nothing else does."""
    try:
        kernel(*arguments, **named)
    except Exception as error:
        error.add_note(note)
        raise


def _with_number(kernel: Kernel, name: str, request: KernelRequest, *arguments: Any, **named: Any) -> None:
    """Call a kernel that takes the offset of its random numbers as a number only.

    Raises:
        BackendError: in a CUDA graph that is captured, in which the number would stay what it is.
    """
    values, place = list(arguments), _OFFSET[request.op]
    values[place] = 0 if request.variant.rounding is not Rounding.STOCHASTIC else _number(values[place], name, request.op)
    kernel(*values, **named)


def _number(offset: Offset, name: str, op: str) -> int:
    number = known_number(offset)
    if number is not None:
        return number
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(
            f"backend {name} runs {op} with the offset of its random numbers as a Python integer, and every replay of the CUDA "
            "graph that is captured would round alike: capture with another backend (triton and aten take the offset as a tensor), "
            "or round to nearest"
        )
    return int(offset)
