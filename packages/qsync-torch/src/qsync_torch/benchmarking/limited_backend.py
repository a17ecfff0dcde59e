"""A backend that offers only its best guesses, so that a run of the benchmarks compiles tens of kernels and not hundreds."""

from __future__ import annotations

from collections.abc import Sequence

from qsync_core.kernels.backend import CompilingBackend, KernelBackend, KernelConfig, KernelRequest, Op
from qsync_torch.tuning.compiling import kernel_of

_MOST = 24


class LimitedBackend:
    """The same backend under the same name, with fewer candidates.

    Attributes:
        compiles: it compiles libraries, which takes tens of seconds each.
    """

    def __init__(self, backend: KernelBackend, libraries: int, just_in_time: int) -> None:
        """Limit a backend.

        Args:
            backend: whose kernels.
            libraries: how many libraries a request may have compiled, where the backend compiles; run-time knobs come on top.
            just_in_time: how many configurations of a product other backends may offer; 0 leaves their products out.
        """
        self._backend, self._libraries, self._just_in_time = backend, libraries, just_in_time
        self.name, self.api_version = backend.name, backend.api_version
        self.kernel_specs, self.build = backend.kernel_specs, backend.build
        self.compiles = isinstance(backend, CompilingBackend)

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """The backend's, and that it is left out."""
        if self._is_left_out(request):
            return ["its products are left out of this measurement"]
        return self._backend.unsupported_reasons(request)

    def _is_left_out(self, request: KernelRequest) -> bool:
        return not (self._just_in_time or self.compiles or self.name == "aten" or request.op == Op.QUANTIZE)

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """The best guesses."""
        configs = self._backend.candidate_configs(request)
        if request.op == Op.QUANTIZE:
            return configs
        if not self.compiles:
            return configs[: max(1, self._just_in_time)]
        return first_libraries(configs, self._libraries)[:_MOST]


def first_libraries(configs: Sequence[KernelConfig], count: int) -> list[KernelConfig]:
    """The configurations of the first ``count`` compiled libraries, in their order."""
    kept: list[KernelConfig] = []
    libraries: set[str] = set()
    for config in configs:
        library = kernel_of(config.text)
        if library in libraries or len(libraries) < count:
            libraries.add(library)
            kept.append(config)
    return kept
