"""The backend under test, and how the suite asks it for kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelBackend, KernelRequest, takes_offset_tensors
from qsync_core.plugins.registry import Registry
from qsync_torch.devices import compute_capability

Kernel = Callable[..., Any]
SUBJECT: pytest.StashKey[Subject] = pytest.StashKey()
"""Where pytest's configuration keeps the backend under test."""

REFUSES = "refuses"
"""What the reason of a skipped test says, behind the backend's name, where the backend has reasons of its own."""


def find_device(name: str | None) -> torch.device:
    """The device of that kind; without a name, the current CUDA device where there is one.

    Raises:
        pytest.UsageError: when there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: this machine has no CUDA device")
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def find_backend(name: str | None) -> KernelBackend:
    """The backend of that name among the installed plugins, or an instance of ``package.module:Class``.

    Raises:
        pytest.UsageError: when there is none; the message names those that are there.
    """
    if not name:
        raise pytest.UsageError("say which backend to test: pytest --pyargs qsync_torch.conformance --backend NAME")
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            backend: KernelBackend = getattr(importlib.import_module(module), attribute)()
            return backend
        except (ImportError, AttributeError) as error:
            raise pytest.UsageError(f"--backend {name}: {error}") from None
    registry = Registry.load()
    backends = {backend.name: backend for backend in registry.backends()}
    if name not in backends:
        raise pytest.UsageError(
            registry.why_disabled(name)
            or f"there is no kernel backend {name!r} here; installed are {', '.join(backends) or 'none'}{registry.all_disabled()}; "
            "install the package that provides it, or write --backend package.module:Class"
        )
    return backends[name]


@attrs.frozen
class Subject:
    """A backend on a device.

    Attributes:
        device: where kernels run.
        most_configs: how many configurations of a request are tried, the backend's best guesses first.
    """

    backend: KernelBackend
    device: torch.device
    most_configs: int

    def request(self, op: str, variant: Variant, shapes: tuple[tuple[int, ...], ...], **more: Any) -> KernelRequest:
        """What a call on this device would ask for; ``more`` are further fields (geometry, multiplied, transposed)."""
        capability = compute_capability(self.device)
        return KernelRequest(op, variant, shapes, device_kind=self.device.type, compute_capability=capability, **more)

    def offers(self, op: str, compute: Precision | None = None) -> bool:
        """Whether its specifications list the operator on this kind of device, in a format if one is given."""
        return any(
            spec.op == op and self.device.type in spec.device_kinds and (compute is None or str(compute) in spec.compute)
            for spec in self.backend.kernel_specs()
        )

    @property
    def offered(self) -> set[str]:
        """The operators that its specifications list on this kind of device."""
        return {spec.op for spec in self.backend.kernel_specs() if self.offers(spec.op)}

    def skip_unless_offered(self, op: str, compute: Precision | None = None) -> None:
        """Skip the test where the backend does not offer the operator, in a format if one is given."""
        if not self.offers(op, compute):
            where = f"in {compute} on {self.device.type}" if compute else f"on {self.device.type}"
            pytest.skip(f"{self.backend.name} does not offer {op} {where}")

    def skip_unless_offset_tensors(self) -> None:
        """Skip the test where the backend does not say that it takes the offset of random numbers as a tensor."""
        if not takes_offset_tensors(self.backend):
            pytest.skip(
                f"{self.backend.name} takes the offset of random numbers as an integer only: it has no offset_tensors = True"
            )

    def refuses(self, op: str, variant: Variant, shapes: tuple[tuple[int, ...], ...], **more: Any) -> bool:
        """Whether it does not offer the operator or has reasons against the request."""
        return not self.offers(op, variant.compute) or bool(
            self.backend.unsupported_reasons(self.request(op, variant, shapes, **more))
        )

    def kernels(self, op: str, variant: Variant, shapes: tuple[tuple[int, ...], ...], **more: Any) -> list[Kernel]:
        """Kernels for a request, one per configuration; the test is skipped, by name, where the backend does not take it."""
        self.skip_unless_offered(op, variant.compute)
        request = self.request(op, variant, shapes, **more)
        if reasons := self.backend.unsupported_reasons(request):
            check_sentences(reasons)
            pytest.skip(f"{self.backend.name} {REFUSES} {op}: {'; '.join(reasons)}")
        configs = self.backend.candidate_configs(request)
        assert configs, f"candidate_configs is empty for a request that has no reasons against it: {request}"
        return [self.backend.build(request, config) for config in list(configs)[: self.most_configs]]


def check_sentences(reasons: list[str]) -> None:
    """Reasons are sentences for people."""
    assert isinstance(reasons, list), f"unsupported_reasons must return a list, got {type(reasons).__name__}"
    for reason in reasons:
        assert isinstance(reason, str), f"a reason must be text, got {reason!r}"
        assert len(reason.split()) >= 3, f"a reason must be a sentence that says why, got {reason!r}"
        assert "\n" not in reason, f"a reason must be one line, got {reason!r}"
