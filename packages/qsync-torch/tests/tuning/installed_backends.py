"""Backends that run ATen's kernels under other names, and tell which of their kernels ran."""

from collections.abc import Sequence
from types import SimpleNamespace

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import BACKEND_API_VERSION, KernelConfig, KernelRequest
from qsync_torch.aten.backend import AtenBackend


class NamedBackend:
    """ATen's kernels under a name, with configurations; ``refuses`` maps the end of an op's name to a reason against it."""

    api_version = BACKEND_API_VERSION

    def __init__(self, name: str, configs: Sequence[str] = ("a", "b"), refuses: dict[str, str] | None = None) -> None:
        self.name, self.configs, self.refuses = name, configs, refuses or {}
        self.ran: list[tuple[str, str]] = []
        self.built: list[tuple[str, str]] = []
        self._aten = AtenBackend()

    def kernel_specs(self):
        return self._aten.kernel_specs()

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        own = [reason for end, reason in self.refuses.items() if request.op.endswith(end)]
        return own or self._aten.unsupported_reasons(request)

    def candidate_configs(self, request: KernelRequest):
        return [KernelConfig(text) for text in self.configs]

    def build(self, request: KernelRequest, config: KernelConfig):
        if config.text not in self.configs:
            raise BackendError(f"backend {self.name} has no configuration {config.text!r}")
        self.built.append((request.op, config.text))
        kernel = self._aten.build(request, KernelConfig())

        def run(*arguments):
            self.ran.append((request.op, config.text))
            return kernel(*arguments)

        return run


class CompilingNamedBackend(NamedBackend):
    """One that compiles ahead of time, and remembers for what."""

    def __init__(self, name: str, **options) -> None:
        super().__init__(name, **options)
        self.compiled: list[tuple[str, int]] = []

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        return [] if request.device_kind == "cuda" else super().unsupported_reasons(request)

    def compile_ahead(self, requests, arch, progress):
        progress(len(requests), len(requests), "all")
        self.compiled.append((arch, len(requests)))
        return SimpleNamespace(kernels=7)


PRODUCTS = ("linear.output", "linear.grad_input", "linear.grad_weight")


class LateBackend(CompilingNamedBackend):
    """One whose products are compiled; what ``cache`` holds is there when the process starts."""

    def __init__(self, cache=(), refuses=None) -> None:
        super().__init__("late", refuses=refuses or {"quantize": "not offered"})
        self.cache, self.asked = set(cache), []

    def unsupported_reasons(self, request):
        return NamedBackend.unsupported_reasons(self, request)

    def is_compiled(self, request, config):
        return (request.op, config.text) in self.cache

    def compile_later(self, request, config):
        if (request.op, config.text) not in self.asked:
            self.asked.append((request.op, config.text))
