"""What a plugin offers as a kernel backend, checked where it is loaded and wherever it answers.

A backend is somebody else's code.  Whatever it raises or returns that the interface does not allow becomes a BackendError that
names the backend and the method, what was expected and what came instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from qsync_core.errors import BackendError, QSyncError
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelBackend, KernelConfig, KernelRequest, KernelSpec
from qsync_core.kernels.choice import AUTO_BACKEND, BACKEND_NAME
from qsync_core.progress import ProgressCallback
from qsync_core.tuning.search import CompilingBackend

T = TypeVar("T")
_METHODS = ("kernel_specs", "unsupported_reasons", "candidate_configs", "build")


def backend_problem(backend: Any) -> str | None:
    """Why something that a plugin offers can not be used as a backend, in a sentence; None where it can."""
    if isinstance(backend, type):
        return f"it offers the class {backend.__name__} itself; offer an instance, {backend.__name__}()"
    what = f"a {type(backend).__name__}"
    missing = [name for name in ("name", "api_version") if not hasattr(backend, name)]
    missing += [f"{name}()" for name in _METHODS if not callable(getattr(backend, name, None))]
    if len(missing) == len(_METHODS) + 2:
        return f"{what} is not a kernel backend"
    if missing:
        return f"{what} is not a kernel backend: it has no {', '.join(missing)}"
    if not isinstance(backend.name, str) or not BACKEND_NAME.fullmatch(backend.name):
        return f"a backend's name has letters, digits, '_', '.' and '-' only, got {backend.name!r}"
    if backend.name == AUTO_BACKEND:
        return f"the name {AUTO_BACKEND!r} stands for all backends; give it another name"
    if type(backend.api_version) is not int:
        return f"its api_version must be the integer {BACKEND_API_VERSION}, got {backend.api_version!r}"
    if backend.api_version != BACKEND_API_VERSION:
        return f"its backend API version is {backend.api_version}, this qsync-core has {BACKEND_API_VERSION}"
    try:
        checked(backend).kernel_specs()
    except BackendError as error:
        return str(error)
    return None


def checked(backend: KernelBackend) -> KernelBackend:
    """The backend, with answers that are checked; one that compiles ahead of time still does."""
    return CheckedCompilingBackend(backend) if isinstance(backend, CompilingBackend) else CheckedBackend(backend)


class CheckedBackend:
    """A backend whose answers are what the interface says, or a BackendError."""

    def __init__(self, backend: KernelBackend) -> None:
        self.name = backend.name
        self.api_version = backend.api_version
        self.unchecked: Any = backend
        """The backend itself."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.unchecked!r})"

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What it offers, as data only."""
        specs = self._list("kernel_specs", "KernelSpec", KernelSpec, self._ask("kernel_specs"))
        for spec in specs:
            for field, value in (("compute", spec.compute), ("device_kinds", spec.device_kinds)):
                if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
                    raise self._wrong(
                        "kernel_specs", f"has a KernelSpec of {spec.op} whose {field} must be a tuple of texts", value
                    )
        return specs

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it can not run the request, each reason a sentence; empty means it can."""
        return list(self._list("unsupported_reasons", "texts", str, self._ask("unsupported_reasons", request)))

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Configurations worth trying, best guess first; at least one."""
        configs = self._list("candidate_configs", "KernelConfig", KernelConfig, self._ask("candidate_configs", request))
        if not configs:
            raise self._wrong("candidate_configs", "must return at least one KernelConfig for a request that it takes", configs)
        return configs

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel."""
        kernel = self._ask("build", request, config)
        if not callable(kernel):
            raise self._wrong("build", f"must return a function for {request.op}", kernel)
        return kernel  # type: ignore[no-any-return]

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.unchecked, method)(*arguments)
        except QSyncError:
            raise
        except (Exception, SystemExit) as error:
            said = " ".join(str(error).split())[:500]
            raise BackendError(f"backend {self.name}: its {method} failed with {type(error).__name__}: {said}") from error

    def _list(self, method: str, of_what: str, kind: type[T], found: Any) -> Sequence[T]:
        if not isinstance(found, (list, tuple)):
            raise self._wrong(method, f"must return a list of {of_what}", found)
        for entry in found:
            if not isinstance(entry, kind):
                raise self._wrong(method, f"must return a list of {of_what}", entry, "a list with ")
        return found

    def _wrong(self, method: str, expected: str, found: Any, inside: str = "") -> BackendError:
        text = repr(found)
        text = text if len(text) <= 80 else f"{text[:77]}..."
        return BackendError(f"backend {self.name}: its {method} {expected}, got {inside}{type(found).__name__} {text}")


class CheckedCompilingBackend(CheckedBackend):
    """The same of a backend that compiles ahead of time."""

    def compile_ahead(self, requests: Sequence[KernelRequest], arch: str, progress: ProgressCallback) -> object:
        """Compile the candidates of requests that the backend supports, into its cache."""
        return self._ask("compile_ahead", requests, arch, progress)
