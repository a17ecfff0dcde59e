"""The plugin registry: finds plugins, keeps broken ones from hurting the others, and answers requests for kernels."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pluggy

from qsync_core.errors import BackendError, PluginError, QSyncError
from qsync_core.kernels.backend import KernelBackend, KernelConfig, KernelRequest
from qsync_core.plugins import compat, hooks
from qsync_core.plugins.backends import Answer, DefaultSelection, ask_backend, checked, name_and_problem, refusal
from qsync_core.plugins.doctor import DoctorLine, JobFindings, Status, core_lines
from qsync_core.plugins.guard import guard, origin
from qsync_core.printable import printable

if TYPE_CHECKING:
    import click

    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.observations import Observations
    from qsync_core.tuning.store import TuningStore

T = TypeVar("T")

_SLOW_IMPORT_S = 10.0
_BUILT_IN = {"aten": "qsync-torch", "cutlass": "qsync-kernels-cutlass", "triton": "qsync-kernels-triton"}
"""QSync's own backends, by the plugin that offers each: another plugin's backend of such a name is left out."""


@attrs.define
class Registry:
    """Plugins by name.

    Attributes:
        disabled: plugins that do not take part, by name, with the reason.
        command_owners: the plugin of each command that :meth:`commands` found, by the command's name.
    """

    disabled: dict[str, str] = attrs.field(factory=dict, init=False)
    command_owners: dict[str, str] = attrs.field(factory=dict, init=False)
    _manager: pluggy.PluginManager = attrs.field(factory=lambda: pluggy.PluginManager("qsync"), init=False)
    _backends: list[KernelBackend] | None = attrs.field(default=None, init=False)
    _distributions: dict[str, str] = attrs.field(factory=dict, init=False)
    _owners: dict[str, str] = attrs.field(factory=dict, init=False)
    _unusable: dict[str, str] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._manager.add_hookspecs(hooks)
        self._manager.register(DefaultSelection(), "qsync-core")

    @classmethod
    def load(cls, entry_points: Iterable[metadata.EntryPoint] | None = None) -> Registry:
        """A registry with every installed plugin.

        Plugins that cannot be imported, or whose hooks do not fit, are listed in ``disabled``.

        Args:
            entry_points: the plugins; None takes the installed ones (entry-point group ``qsync``).

        Raises:
            CompatibilityError: when the installed QSync packages are of different series.
            PluginError: when two plugins have one name.
        """
        compat.check_installed()
        registry = cls()
        if entry_points is None:
            entry_points = metadata.entry_points(group=hooks.ENTRY_POINT_GROUP)
        for entry_point in sorted(entry_points, key=lambda found: found.name):
            registry._load_one(entry_point)
        return registry

    def _load_one(self, entry_point: metadata.EntryPoint) -> None:
        name = entry_point.name
        origin = entry_point.dist.name if entry_point.dist else entry_point.value
        if name in self._distributions:
            raise PluginError(
                f"two plugins are called {name!r}: one of {self._distributions[name]}, one of {origin}; "
                "give one of them another name, or uninstall it"
            )
        self._distributions[name] = origin
        plugin = None
        with self._guarded(name, "its import"), _named_when_slow(name, origin):
            plugin = entry_point.load()
        if name not in self.disabled:
            self.register(plugin, name)

    def register(self, plugin: Any, name: str) -> None:
        """Add a plugin object; one whose hooks do not fit the specifications is disabled.

        Raises:
            PluginError: when the name is taken.
        """
        if self._manager.has_plugin(name):
            raise PluginError(f"two plugins are called {name!r}; give one of them another name")
        with self._guarded(name, "reading its hooks"):
            try:
                self._manager.register(plugin, name)
                self._check_hooks(plugin)
            except (pluggy.PluginValidationError, PluginError) as error:
                self._disable(name, f"its hooks do not fit: {' '.join(str(error).split())}")

    def _check_hooks(self, plugin: Any) -> None:
        for function in dir(plugin):
            options = self._manager.parse_hookimpl_opts(plugin, function) if function.startswith("qsync_") else None
            if options is None:
                continue
            if not hasattr(hooks, function):
                raise PluginError(f"there is no hook {function!r}; see docs/hooks.md")
            if options["wrapper"] or options["hookwrapper"]:
                raise PluginError(f"{function} is a wrapper, which QSync's hooks do not have; see docs/hooks.md")

    def _disable(self, name: str, reason: str) -> None:
        self.disabled[name] = reason
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)
        self._backends = None

    def _guarded(self, plugin: str, what: str, passing: tuple[type[BaseException], ...] = ()) -> guard:
        """A guard that disables the plugin."""
        return guard(what, lambda sentence, error: self._disable(plugin, sentence), passing=passing)

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins that take part, in alphabetical order."""
        return sorted(name for name, _ in self._manager.list_name_plugin() if name != "qsync-core")

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        return sorted(getattr(self._manager.hook, hook).get_hookimpls(), key=lambda found: found.plugin_name)

    def _call_each(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call a hook plugin by plugin, in order of their names; one that raises is disabled."""
        results = []
        for implementation in self._implementations(hook):
            with self._guarded(implementation.plugin_name, f"its {hook}"):
                results.append((implementation.plugin_name, _call(implementation, arguments)))
        return results

    def _first(self, hook: str, expected: type[T], **arguments: Any) -> T | None:
        """What the first plugin that knows an answer says, in pluggy's order (the last registered first), or None.

        An error of QSync's is the answer and passes; a plugin that raises anything else, or answers with something else than
        ``expected``, is disabled, and the next one is asked.
        """
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            name, answer = implementation.plugin_name, None
            with self._guarded(name, f"its {hook}", passing=(QSyncError,)):
                answer = _call(implementation, arguments)
            if isinstance(answer, expected):
                return answer
            if answer is not None:
                self._disable(name, f"its {hook} must return {expected.__name__} or None, got {type(answer).__name__}")
        return None

    def collect(self, hook: str, problem: Callable[[Any], str] = lambda offered: "") -> list[Any]:
        """What all plugins offer through a hook that returns a list, in order of the plugins' names.

        Args:
            problem: why an offer is unusable, empty where it is usable; an unusable one is left out, and ``disabled`` names it.
        """
        found: list[Any] = []
        for name, offers in self._call_each(hook):
            if not isinstance(offers, (list, tuple)):
                self._disable(name, f"its {hook} must return a list, got {type(offers).__name__}")
                continue
            usable = []
            for offered in offers:
                with self._guarded(name, f"what it offers, {origin(offered)},"):
                    if reason := problem(offered):
                        self.disabled[f"{name} ({origin(offered)})"] = reason
                    else:
                        usable.append(offered)
            if name not in self.disabled:
                found.extend(usable)
        return found

    def collect_named(
        self,
        hook: str,
        kind: str,
        lacks: Callable[[Any], str],
        *,
        taken: Iterable[str] = (),
        announce: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """The objects with a ``name`` that plugins offer through a hook, by that name.

        Args:
            kind: what is offered, for messages: ``indicator``.
            lacks: which part of the interface an object lacks, empty for none; such an object is left out, as is a class, and one
                whose name is not one word.
            taken: names that are given already.
            announce: receives a sentence on every plugin that this call disables, or of which it leaves something out.

        Raises:
            PluginError: for two of one name.
        """

        def problem(offered: Any) -> str:
            if isinstance(offered, type):
                reason = "it is a class, where an instance of it is asked for"
            elif lacking := lacks(offered):
                reason = lacking
            elif not isinstance(offered.name, str) or not re.fullmatch(r"[^\s,]+", offered.name):
                reason = f"its name is {offered.name!r}, and must be text without blanks and commas"
            else:
                return ""
            return f"{reason}; fix or uninstall that plugin"

        known, names = set(self.disabled), set(taken)
        found: dict[str, Any] = {}
        for offered in self.collect(hook, problem):
            if offered.name in names:
                raise PluginError(f"two {kind}s are called {offered.name!r}; uninstall the plugin with the second, or rename it")
            names.add(offered.name)
            found[offered.name] = offered
        for plugin, reason in self.disabled.items():
            if plugin not in known:
                announce(f"plugin {plugin} is disabled: {reason}")
        return found

    def commands(self, taken: Iterable[str] = ()) -> dict[str, click.Command]:
        """Subcommands of all plugins by name; a plugin that uses a name of ``taken`` or of an earlier plugin is disabled."""
        import click

        found: dict[str, click.Command] = {}
        for implementation in self._implementations("qsync_register_commands"):
            group, name = click.Group(), implementation.plugin_name
            with self._guarded(name, "its qsync_register_commands"):
                _call(implementation, {"cli": group})
            if name in self.disabled:
                continue
            if strange := [command for command, value in group.commands.items() if not isinstance(value, click.Command)]:
                self._disable(name, f"what it registers as {strange[0]!r} is no click command")
                continue
            if clash := sorted((set(found) | set(taken)) & set(group.commands)):
                self._disable(name, f"it registers the command {clash[0]!r}, which exists already")
                continue
            found.update(group.commands)
            self.command_owners.update(dict.fromkeys(group.commands, name))
        return found

    def doctor_lines(self) -> list[DoctorLine]:
        """Findings of all plugins."""
        return self.collect("qsync_doctor", lambda line: "" if isinstance(line, DoctorLine) else "it is no DoctorLine")

    def machine_lines(self) -> list[DoctorLine]:
        """All that core and the plugins find on this machine, and which plugins there are."""
        lines = core_lines() + self.doctor_lines()
        try:
            self.backends()  # asks every plugin, so that those that fail are listed too
        except PluginError as error:
            lines.append(DoctorLine("kernel backends", str(error), Status.ERROR))
        for name in self.plugins:
            if self._manager.get_hookcallers(self._manager.get_plugin(name)):
                lines.append(DoctorLine(f"plugin {name}", "loaded"))
            else:
                advice = "mark its hooks with @hookimpl (docs/hooks.md)"
                lines.append(DoctorLine(f"plugin {name}", "loaded, offers nothing", Status.WARNING, advice))
        return lines + [DoctorLine(f"plugin {name}", f"disabled: {reason}", Status.ERROR) for name, reason in self.disabled.items()]

    def doctor_job(self, timeout_s: float) -> JobFindings | None:
        """What the processes of a job find together, None where this process is of none.

        Raises:
            QSyncError: what keeps this process from taking part.
        """
        return self._first("qsync_doctor_job", JobFindings, timeout_s=timeout_s)

    def trace_job(self, job: str) -> PrecisionDag | None:
        """The graph of a job, None where no plugin traces jobs.

        Raises:
            QSyncError: what the plugin says is wrong with the job.
        """
        from qsync_core.ir.dag import PrecisionDag

        return self._first("qsync_trace_job", PrecisionDag, job=job)

    def describe_device(self, device: str) -> hooks.DeviceFacts | None:
        """What kernels depend on, of a device of this machine; None where no plugin knows it."""
        return self._first("qsync_describe_device", hooks.DeviceFacts, device=device)

    def measure_truth(self, request: hooks.TruthRequest) -> Observations | None:
        """The measured sensitivity of a job, None where no plugin measures it.

        Raises:
            QSyncError: what the plugin says is wrong with the job or the budget.
        """
        from qsync_core.ir.observations import Observations

        return self._first("qsync_measure_truth", Observations, request=request)

    def backends(self) -> list[KernelBackend]:
        """Every usable kernel backend, in order of their names; they raise nothing but BackendError.

        Raises:
            PluginError: when two have one name, because plans name the backend that they want.
        """
        if self._backends is None:
            owners: dict[str, str] = {}
            found: list[KernelBackend] = []
            offers = self._call_each("qsync_register_backends")
            for plugin, offered in sorted(offers, key=lambda offer: offer[0] not in _BUILT_IN.values()):
                if not isinstance(offered, (list, tuple)):
                    got = offered.__name__ if isinstance(offered, type) else type(offered).__name__
                    self._disable(plugin, f"its qsync_register_backends must return a list of backends, got {got}")
                    continue
                for backend in offered:
                    name, problem = name_and_problem(backend)
                    if problem:
                        self.disabled[f"{plugin} (backend {name})"] = problem
                        self._unusable[name] = problem
                        continue
                    if name in owners and owners[name] == _BUILT_IN.get(name):
                        taken = f"the name {name!r} is that of a backend of {owners[name]}; give it another name"
                        self.disabled[f"{plugin} (backend {name})"] = taken
                        continue
                    if owners.get(name) == plugin:
                        raise PluginError(f"plugin {plugin} offers two backends {name!r}; give one of them another name")
                    if name in owners:
                        raise PluginError(
                            f"plugins {owners[name]} and {plugin} both offer a backend {name!r}; give one of them another name, "
                            "or uninstall it"
                        )
                    owners[name] = plugin
                    found.append(checked(backend))
            self._owners = owners
            self._backends = sorted(found, key=lambda backend: backend.name)
        return self._backends

    def why_disabled(self, backend: str) -> str:
        """A sentence on a backend that a plugin offers and that cannot be used; empty where no plugin offers it."""
        self.backends()
        if backend not in self._unusable:
            # What a plugin would have offered that cannot be imported only its name says: qsync-kernels-mine.
            plugins = [name for name in self.disabled if name == backend or name.endswith(f"-{backend}")]
            return f"kernel backend {backend!r}: plugin {plugins[0]} is disabled: {self.disabled[plugins[0]]}" if plugins else ""
        return f"kernel backend {backend!r} is installed here and disabled: {self._unusable[backend]}"

    def all_disabled(self) -> str:
        """What to add to a message about something that is missing: it may be in a plugin that is disabled."""
        return "".join(f"; plugin {plugin} is disabled: {reason}" for plugin, reason in self.disabled.items())

    def answers(
        self, request: KernelRequest, names: Sequence[str] | None = None, *, store: TuningStore | None = None
    ) -> list[Answer]:
        """What every backend says to a request, by name.

        Args:
            names: the backends that are asked; None asks all.
            store: tuning records of this machine; without it a backend's first candidate configuration is taken.

        Raises:
            BackendError: when one of ``names`` is not installed.
        """
        backends = {backend.name: backend for backend in self.backends()}
        for name in names or ():
            if name not in backends:
                raise BackendError(
                    self.why_disabled(name)
                    or f"there is no kernel backend {name!r} here; installed are {', '.join(backends) or 'none'}"
                    + self.all_disabled()
                )
        return [ask_backend(backend, request, store) for name, backend in backends.items() if names is None or name in names]

    def choose(self, request: KernelRequest, answers: Sequence[Answer]) -> Answer:
        """The answer that ``qsync_select_backend`` picks among those of backends that can run the request.

        Raises:
            BackendError: with every backend's reasons, when none can.
        """
        able = {answer.backend: answer for answer in answers if not answer.reasons}
        if not able:
            raise BackendError(refusal(request, {a.backend: list(a.reasons) for a in answers}) + self.all_disabled())
        candidates = tuple(hooks.Candidate(answer.backend, answer.config, answer.latency_ns) for answer in able.values())
        chosen = self._first("qsync_select_backend", str, request=request, candidates=candidates)
        if chosen not in able:
            raise BackendError(f"a plugin chose the backend {chosen!r} for {request.op}; it can only be {', '.join(able)}")
        left = {backend.name for backend in self.backends()}
        if chosen not in left:  # its plugin failed to choose, and is disabled with its backends
            return self.choose(request, [answer for answer in answers if answer.backend in left])
        return able[chosen]

    def select(
        self, request: KernelRequest, backend_name: str | None = None, *, store: TuningStore | None = None
    ) -> tuple[KernelBackend, KernelConfig]:
        """The backend and configuration for a request.

        Args:
            backend_name: the backend that a plan names; no other is taken in its place.  None lets the plugins choose.
            store: tuning records of this machine; without it a backend's first candidate configuration is taken.

        Raises:
            BackendError: with every backend's reasons, when none (or not the named one) can run it.
        """
        chosen = self.choose(request, self.answers(request, None if backend_name is None else [backend_name], store=store))
        backend = next(backend for backend in self.backends() if backend.name == chosen.backend)
        return backend, KernelConfig(chosen.config)

    def backend_versions(self) -> dict[str, str]:
        """The version of the distribution that each backend comes from, by the backend's name; unknown ones are left out."""
        self.backends()
        found = {}
        for backend, plugin in self._owners.items():
            with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
                found[backend] = metadata.version(self._distributions.get(plugin, ""))
        return found


@contextlib.contextmanager
def _named_when_slow(name: str, origin: str) -> Iterator[None]:
    """Name on standard error a plugin whose import takes long, once: one that hangs would keep every command without a word."""
    where = "" if origin == name else f" (of {origin})"
    sentence = (
        f"note: the import of plugin {name}{where} has taken {_SLOW_IMPORT_S:g} s and goes on; where it does not end, press Ctrl-C "
        "and uninstall the plugin"
    )
    timer = threading.Timer(_SLOW_IMPORT_S, lambda: print(printable(sentence), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """A plugin's function with those of the hook's arguments that it takes."""
    return implementation.function(*(arguments[name] for name in implementation.argnames))
