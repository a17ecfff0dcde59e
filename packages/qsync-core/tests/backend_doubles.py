"""A backend that runs nothing, for tests of the registry and of tuning."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op

LINEAR_INT8 = KernelRequest(Op.LINEAR_OUTPUT, Variant.of(Precision.INT8, output=Precision.FLOAT32), ((128, 64), (32, 64)))


@attrs.define
class FakeBackend:
    """``latencies_ns`` maps each configuration to what running it takes; None stands for one that does not build."""

    name: str = "fake"
    reasons: tuple[str, ...] = ()
    latencies_ns: dict[str, int | None] = attrs.field(factory=lambda: {"": 5})
    api_version: int = BACKEND_API_VERSION

    def kernel_specs(self) -> Sequence[KernelSpec]:
        return [KernelSpec(Op.LINEAR_OUTPUT, ("int8", "float32"), ("cpu",))]

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        return list(self.reasons)

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        return [KernelConfig(text) for text in self.latencies_ns]

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        latency_ns = self.latencies_ns[config.text]
        if latency_ns is None:
            raise BackendError(f"configuration {config.text} needs more shared memory than there is")
        return lambda: latency_ns
