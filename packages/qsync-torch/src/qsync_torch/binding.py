"""A binding: which variant an operator runs as, on whose kernels, with which configuration and geometry; and the built kernels.

A custom operator takes plain values only, so a binding travels through it as text and is read back with a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import torch

from qsync_core.backend import Kernel, KernelBackend, KernelConfig, KernelRequest
from qsync_core.errors import BackendError
from qsync_core.variant import Variant
from qsync_torch.aten_backend import AtenBackend

DEFAULT_BACKEND = "aten"


@attrs.frozen
class Binding:
    """How one operator is run.

    Attributes:
        variant: precisions, granularity, rounding.
        backend: name of a kernel backend; ``a+b`` means a, and b for what a does not offer (a visible choice, never made silently).
        config: its configuration as text.
        attributes: stride, padding, dilation and groups of a convolution as canonical text, sorted by name.
    """

    variant: Variant
    backend: str = DEFAULT_BACKEND
    config: str = ""
    attributes: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """Canonical text; :func:`parse_binding` reads it."""
        attributes = "&".join(f"{name}={value}" for name, value in self.attributes)
        return "|".join((self.backend, self.config, str(self.variant), attributes))


@functools.lru_cache(maxsize=4096)
def parse_binding(text: str) -> Binding:
    """Read a binding's canonical text."""
    backend, config, variant, attributes = text.split("|")
    pairs = (tuple(part.split("=", 1)) for part in attributes.split("&") if part)
    return Binding(Variant.parse(variant), backend, config, tuple((name, value) for name, value in pairs))


@functools.lru_cache(maxsize=64)
def find_backends(names: str) -> tuple[KernelBackend, ...]:
    """The backends of a name such as ``aten`` or ``triton+aten``.

    Raises:
        BackendError: when one is not installed; the message names those that are.
    """
    found = []
    for name in names.split("+"):
        if name == AtenBackend.name:
            found.append(AtenBackend())
            continue
        from qsync_core.registry import Registry

        installed = {backend.name: backend for backend in Registry.load().backends()}
        if name not in installed:
            known = ", ".join(sorted({*installed, AtenBackend.name}))
            raise BackendError(
                f"kernel backend {name!r} is not installed here (found: {known}); install the package that provides it, "
                "or name another backend"
            )
        found.append(installed[name])
    return tuple(found)


@functools.lru_cache(maxsize=16)
def device_facts(device: torch.device) -> tuple[str, str]:
    """Kind and compute capability (empty on a CPU) of a device."""
    if device.type != "cuda":
        return device.type, ""
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", f"{major}.{minor}"


def request_for(op: str, binding: Binding, shapes: Sequence[tuple[int, ...]], device: torch.device) -> KernelRequest:
    """The request that a call with these operand shapes puts to a backend."""
    kind, capability = device_facts(device)
    return KernelRequest(op, binding.variant, tuple(shapes), dict(binding.attributes), kind, capability)


def reasons_against(request: KernelRequest, names: str) -> list[str]:
    """Why none of the named backends runs a request, as ``backend: reason``; empty when one does."""
    refusals = []
    for backend in find_backends(names):
        reasons = backend.unsupported_reasons(request)
        if not reasons:
            return []
        refusals.extend(f"{backend.name}: {reason}" for reason in reasons)
    return refusals


def build_kernel(request: KernelRequest, names: str, config: str) -> Kernel:
    """Build a kernel with the first of the named backends that supports the request.

    Raises:
        BackendError: with every backend's reasons.
    """
    for backend in find_backends(names):
        if not backend.unsupported_reasons(request):
            chosen = KernelConfig(config) if config else backend.candidate_configs(request)[0]
            return backend.build(request, chosen)
    shapes = " and ".join(str(list(shape)) for shape in request.shapes)
    raise BackendError(
        f"{request.op} as {request.variant.label} on {shapes} can not run on {request.device_kind}: "
        + "; ".join(reasons_against(request, names))
    )


_KERNELS: dict[tuple[object, ...], Kernel] = {}


def kernel_for(op: str, text: str, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Kernel:
    """The built kernel for a call, made once per operator, binding, operand shapes and device."""
    key = (op, text, shapes, device)
    kernel = _KERNELS.get(key)
    if kernel is None:
        binding = parse_binding(text)
        kernel = build_kernel(request_for(op, binding, shapes, device), binding.backend, binding.config)
        _KERNELS[key] = kernel
    return kernel
