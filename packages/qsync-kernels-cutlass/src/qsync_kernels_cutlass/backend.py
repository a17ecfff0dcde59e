"""The backend ``cutlass``: it has its place, its name and its toolchain check; it offers no kernel yet, and says so."""

from __future__ import annotations

from collections.abc import Sequence

from qsync_core.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec
from qsync_core.errors import BackendError


class CutlassBackend:
    """Kernels from CUTLASS templates.  None so far: every request is refused with that reason."""

    name = "cutlass"
    api_version = BACKEND_API_VERSION

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """Nothing yet."""
        return ()

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it can not run the request: always the same reason for now."""
        return [f"this version of qsync-kernels-cutlass has no kernels yet, so none for {request.op} either"]

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """None, because no request is supported."""
        return ()

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """Always refuses.

        Raises:
            BackendError: with the reason.
        """
        raise BackendError(
            f"backend cutlass can not run {request.op} on {list(request.shapes)}: " + "; ".join(self.unsupported_reasons(request))
        )
