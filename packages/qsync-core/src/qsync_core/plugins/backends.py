"""A plugin's kernel backend: checked where it is loaded and wherever it answers, and what it answers to a request.

Whatever a backend raises or returns that the interface does not allow becomes a BackendError that names the backend and the method,
what was expected and what came instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import attrs

from qsync_core.errors import BackendError, QSyncError
from qsync_core.kernels.backend import (
    BACKEND_API_VERSION,
    BackgroundCompilingBackend,
    CompilingBackend,
    InterruptibleBackend,
    Kernel,
    KernelBackend,
    KernelConfig,
    KernelRequest,
    KernelSpec,
    Op,
    hands_on_maxima,
    takes_offset_tensors,
)
from qsync_core.kernels.choice import AUTO_BACKEND, BACKEND_NAME, FLOAT_BACKEND
from qsync_core.kernels.launches import rehearsal_of, reports_launches
from qsync_core.kernels.support import product_format
from qsync_core.plugins import hooks
from qsync_core.plugins.guard import guard
from qsync_core.progress import ProgressCallback

if TYPE_CHECKING:
    from qsync_core.tuning.store import TuningStore

T = TypeVar("T")
_METHODS = ("kernel_specs", "unsupported_reasons", "candidate_configs", "build")


def name_and_problem(backend: Any) -> tuple[str, str]:
    """The name of a backend that a plugin offers, and why it cannot be used (empty where it can)."""
    name, problems = "", [""]
    with guard("looking at it", lambda sentence, error: problems.append(sentence)):
        name = str(getattr(backend, "name", None))
        problems.append(_backend_problem(backend))
    return name, problems[-1]


def _backend_problem(backend: Any) -> str:
    """Why what a plugin offers cannot be used as a backend, in a sentence; empty where it can."""
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
        old = "qsync-core" if backend.api_version > BACKEND_API_VERSION else "release of the plugin"
        return f"its backend API version is {backend.api_version}, this qsync-core has {BACKEND_API_VERSION}: install a newer {old}"
    try:
        checked(backend).kernel_specs()
    except BackendError as error:
        return str(error)
    return ""


def checked(backend: KernelBackend) -> KernelBackend:
    """The backend with its answers checked; one that compiles ahead of time still does."""
    return CheckedCompilingBackend(backend) if isinstance(backend, CompilingBackend) else CheckedBackend(backend)


class CheckedBackend:
    """A backend whose answers are what the interface says, or a BackendError."""

    def __init__(self, backend: KernelBackend) -> None:
        self.name = backend.name
        self.api_version = backend.api_version
        self.offset_tensors, self.reports_launches = takes_offset_tensors(backend), reports_launches(backend)
        self.hands_on_maxima = hands_on_maxima(backend)
        self.rehearsal = rehearsal_of(backend)
        self._backend: Any = backend

    @property
    def module(self) -> str:
        """Where its class is defined."""
        return type(self._backend).__module__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend!r})"

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What the backend offers, as data only."""

        def check(found: Any) -> Sequence[KernelSpec]:
            specs = self._list("kernel_specs", "KernelSpec", KernelSpec, found)
            for spec in specs:
                for field, value in (("compute", spec.compute), ("device_kinds", spec.device_kinds)):
                    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
                        expected = f"has a KernelSpec of {spec.op} whose {field} must be a tuple of texts"
                        self._refuse("kernel_specs", expected, value)
            return specs

        return self._ask("kernel_specs", check)

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason a sentence; empty means it can."""
        method = "unsupported_reasons"
        reasons = list(self._ask(method, lambda found: self._list(method, "texts", str, found), request))
        if (request.knows_maxima or request.chain.grad_maxima) and not self.hands_on_maxima:  # which it may never have heard of
            reasons.append("it hands on no maxima (hands_on_maxima = True says that a backend does); let quantizations find them")
        return reasons

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Configurations worth trying, best guess first; at least one."""
        method = "candidate_configs"

        def check(found: Any) -> Sequence[KernelConfig]:
            configs = self._list(method, "KernelConfig", KernelConfig, found)
            if not configs:
                self._refuse(method, "must return at least one KernelConfig for a request that it takes", configs)
            return configs

        return self._ask(method, check, request)

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel."""

        def check(found: Any) -> Kernel:
            if not callable(found):
                self._refuse("build", f"must return a function for {request.op}", found)
            return found  # type: ignore[no-any-return]

        return self._ask("build", check, request, config)

    def _ask(self, method: str, check: Callable[[Any], T], *arguments: Any) -> T:
        """The answer of a method, checked inside the guard: looking at an answer is a call into the plugin, too."""
        with guard(f"backend {self.name}: its {method}", _raise_backend_error, passing=(QSyncError,)):
            answer = check(getattr(self._backend, method)(*arguments))
        return answer

    def _list(self, method: str, of_what: str, kind: type[T], found: Any) -> Sequence[T]:
        if not isinstance(found, (list, tuple)):
            self._refuse(method, f"must return a list of {of_what}", found)
        for entry in found:
            if not isinstance(entry, kind):
                self._refuse(method, f"must return a list of {of_what}", entry, "a list with ")
        return found

    def _refuse(self, method: str, expected: str, found: Any, inside: str = "") -> NoReturn:
        text = repr(found)
        text = text if len(text) <= 80 else f"{text[:77]}..."
        raise BackendError(f"backend {self.name}: its {method} {expected}, got {inside}{type(found).__name__} {text}")


class CheckedCompilingBackend(CheckedBackend):
    """The same of a backend that compiles ahead of time."""

    def compile_ahead(self, requests: Sequence[KernelRequest], arch: str, progress: ProgressCallback) -> object:
        """Compile the candidates of requests that the backend supports, into its cache."""
        return self._ask("compile_ahead", lambda found: found, requests, arch, progress)

    def interrupt_compiling(self) -> None:
        """End its compilers, where it can."""
        if isinstance(self._backend, InterruptibleBackend):
            self._ask("interrupt_compiling", lambda found: found)

    def is_compiled(self, request: KernelRequest, config: KernelConfig) -> bool:
        """Whether ``build`` compiles nothing; always True of a backend that cannot compile in the background."""

        def check(found: Any) -> bool:
            if not isinstance(found, bool):
                self._refuse("is_compiled", "must return True or False", found)
            return found

        return not isinstance(self._backend, BackgroundCompilingBackend) or self._ask("is_compiled", check, request, config)

    def compile_later(self, request: KernelRequest, config: KernelConfig) -> None:
        """Compile in the background, where it can."""
        if isinstance(self._backend, BackgroundCompilingBackend):
            self._ask("compile_later", lambda found: found, request, config)


def _raise_backend_error(sentence: str, error: BaseException) -> NoReturn:
    raise BackendError(sentence) from error


@attrs.frozen
class Answer:
    """What a backend says to a request.

    Attributes:
        reasons: why it cannot run the request; empty when it can.
        config: the tuned configuration; its first candidate where it was never tuned.
        latency_ns: what tuning measured, None where it was never tuned.
        exact: the latency is of the request's own shapes; else it is scaled from the nearest ones.
    """

    backend: str
    reasons: tuple[str, ...] = ()
    config: str = ""
    latency_ns: int | None = None
    exact: bool = False


def ask_backend(backend: KernelBackend, request: KernelRequest, store: TuningStore | None) -> Answer:
    """What a backend says to a request; one that fails refuses it."""
    try:
        if reasons := backend.unsupported_reasons(request):
            return Answer(backend.name, tuple(reasons))
        configs = [config.text for config in backend.candidate_configs(request)]
    except BackendError as error:  # a backend that fails here cannot run the request, and the others may
        return Answer(backend.name, (" ".join(str(error).split()).removeprefix(f"backend {backend.name}: "),))
    match = store.look_up(backend.name, request, configs) if store is not None else None
    if match is None:
        return Answer(backend.name, config=configs[0] if configs else "")
    return Answer(backend.name, (), match.record.config, match.latency_ns, match.exact)


def refusal(request: KernelRequest, reasons: dict[str, list[str]]) -> str:
    """The sentence for a request that no backend takes, with the reasons of each."""
    what = f"{request.op} in {request.variant.label} of shapes {list(request.shapes)} on {request.device_kind}"
    if not reasons:
        return f"no kernel backend is installed that could run {what}; install qsync-torch for the reference backend"
    said = "; ".join(f"{name}: {', '.join(why)}" for name, why in sorted(reasons.items()))
    return f"no kernel backend can run {what} ({said})"


class DefaultSelection:
    """Core's own answer to ``qsync_select_backend``, asked last."""

    @staticmethod
    @hooks.hookimpl(trylast=True)
    def qsync_select_backend(request: KernelRequest, candidates: Sequence[hooks.Candidate]) -> str:
        """The lowest tuned latency; a tuned candidate goes before one that never ran, and then the name decides.

        Where nothing was tuned, PyTorch's own kernels go first, but for what they do not do well on a GPU: quantization, 8-bit
        products and producers, which they run one operator after the other (docs/tuning.md#where-nothing-was-tuned).
        """
        is_float_product = request.op in Op.UNFUSED and not product_format(request).needs_scale
        own_last = request.device_kind == "cuda" and not is_float_product
        return min(
            candidates,
            key=lambda c: (c.latency_ns is None, c.latency_ns or 0, (c.backend == FLOAT_BACKEND) is own_last, c.backend),
        ).backend
