"""Plugins: found by entry point, disabled by name when broken, refused when ambiguous; and the choice of a backend."""

from __future__ import annotations

import io
import re
import threading
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from backend_doubles import LINEAR_INT8, FakeBackend
from plugin_doubles import offering, plugin, registry

from qsync_core.errors import BackendError, CompatibilityError, PluginError
from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import BackgroundCompilingBackend, CompilingBackend, KernelConfig, KernelRequest, KernelSpec
from qsync_core.plugins import registry as registry_module
from qsync_core.plugins.backends import Answer
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_core.plugins.registry import Registry
from qsync_core.tuning.search import tune
from qsync_core.tuning.store import TuningStore


@pytest.fixture
def write_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], EntryPoint]:
    """Writes a module and returns an entry point that names it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(module: str, source: str) -> EntryPoint:
        (tmp_path / f"{module}.py").write_text(source)
        return EntryPoint(name=module.replace("_", "-"), value=module, group="qsync")

    return write


GOOD_SOURCE = """
from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.doctor import DoctorLine

@hookimpl
def qsync_doctor():
    return [DoctorLine("good", "here")]
"""


def test_a_plugin_that_raises_on_import_disables_itself_only(write_plugin: Callable[[str, str], EntryPoint]) -> None:
    points = [
        write_plugin("raising_plugin", "import no_such_module_anywhere"),
        write_plugin("exiting_plugin", "raise SystemExit(3)"),
        write_plugin("broken_syntax_plugin", "def ("),
        write_plugin("good_plugin", GOOD_SOURCE),
    ]
    found = Registry.load(points)
    assert found.plugins == ["good-plugin"]
    assert found.doctor_lines() == [DoctorLine("good", "here")]
    assert found.disabled["raising-plugin"] == (
        "its import failed with ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    assert found.disabled["exiting-plugin"] == "its import failed with SystemExit: 3"
    assert found.disabled["broken-syntax-plugin"].startswith("its import failed with SyntaxError")


def test_two_plugins_of_one_name_are_refused(write_plugin: Callable[[str, str], EntryPoint]) -> None:
    first = write_plugin("good_plugin", GOOD_SOURCE)
    second = EntryPoint(name="good-plugin", value="another_module", group="qsync")
    with pytest.raises(PluginError, match=r"two plugins are called 'good-plugin': one of .*; give one of them another name"):
        Registry.load([first, second])
    with pytest.raises(PluginError, match="two plugins are called 'a'; give one of them another name"):
        registry(a=plugin()).register(plugin(), "a")


def test_hooks_that_do_not_fit() -> None:
    found = registry(
        typo=plugin(qsync_register_backend=lambda: [FakeBackend()]),
        parameter=plugin(qsync_register_backends=lambda colour: []),
    )
    assert found.plugins == []
    assert found.disabled["typo"] == "its hooks do not fit: there is no hook 'qsync_register_backend'; see docs/hooks.md"
    assert "Argument(s) {'colour'} are declared in the hookimpl" in found.disabled["parameter"]


def test_functions_that_are_not_marked_are_no_hooks() -> None:
    module = types.ModuleType("plugin")
    module.qsync_something = lambda: 1  # type: ignore[attr-defined]
    assert registry(module=module).plugins == ["module"]


def test_a_hook_that_raises_disables_its_plugin_only() -> None:
    def fail() -> list[Any]:
        raise RuntimeError("no compiler\nfound")

    found = registry(bad=plugin(qsync_register_backends=fail), good=offering(FakeBackend()))
    assert [backend.name for backend in found.backends()] == ["fake"]
    assert found.disabled == {"bad": "its qsync_register_backends failed with RuntimeError: no compiler found"}
    assert found.plugins == ["good"]


def test_a_hook_that_returns_no_list() -> None:
    found = registry(bad=plugin(qsync_doctor=lambda: "fine"), good=plugin(qsync_doctor=lambda: [DoctorLine("a", "b")]))
    assert found.doctor_lines() == [DoctorLine("a", "b")]
    assert found.disabled == {"bad": "its qsync_doctor must return a list, got str"}


def test_unusable_backends_are_reported() -> None:
    found = registry(odd=offering(FakeBackend("old", api_version=0), 5, FakeBackend("new")))
    assert [backend.name for backend in found.backends()] == ["new"]
    assert found.disabled == {
        "odd (backend old)": "its backend API version is 0, this qsync-core has 1: install a newer release of the plugin",
        "odd (backend None)": "a int is not a kernel backend",
    }


class WithoutBuild:
    name, api_version = "half", 1

    def kernel_specs(self) -> list[KernelSpec]:
        return []

    unsupported_reasons = candidate_configs = kernel_specs


@pytest.mark.parametrize(
    ("offered", "reason"),
    [
        (FakeBackend, "it offers the class FakeBackend itself; offer an instance, FakeBackend()"),
        (WithoutBuild(), "a WithoutBuild is not a kernel backend: it has no build()"),
        (FakeBackend("my bad"), "a backend's name has letters, digits, '_', '.' and '-' only, got 'my bad'"),
        (FakeBackend("a/b"), "a backend's name has letters, digits, '_', '.' and '-' only, got 'a/b'"),
        (FakeBackend("auto"), "the name 'auto' stands for all backends; give it another name"),
        (FakeBackend("x", api_version=99), "its backend API version is 99, this qsync-core has 1: install a newer qsync-core"),
        (FakeBackend("x", api_version="1"), "its api_version must be the integer 1, got '1'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_backend_is_disabled_with_the_reason(offered: Any, reason: str) -> None:
    found = registry(odd=offering(offered), good=offering(FakeBackend("good")))
    assert [backend.name for backend in found.backends()] == ["good"]
    assert list(found.disabled.values()) == [reason]


@pytest.mark.parametrize(("offered", "got"), [(FakeBackend(), "FakeBackend"), (None, "NoneType"), (FakeBackend, "FakeBackend")])
def test_a_plugin_that_offers_no_list_of_backends_is_disabled(offered: Any, got: str) -> None:
    found = registry(odd=plugin(qsync_register_backends=lambda: offered), good=offering(FakeBackend("good")))
    assert [backend.name for backend in found.backends()] == ["good"]
    assert found.disabled == {"odd": f"its qsync_register_backends must return a list of backends, got {got}"}


def raising(*_: Any) -> Any:
    raise RuntimeError("no\ncompiler")


def answering(method: str, answer: Any) -> FakeBackend:
    """A backend with another answer of one method."""
    function = answer if callable(answer) else lambda *_: answer
    return type("Odd", (FakeBackend,), {method: lambda self, *arguments: function(*arguments)})("odd")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raising, "its kernel_specs failed with RuntimeError: no compiler"),
        ("linear", "its kernel_specs must return a list of KernelSpec, got str 'linear'"),
        (["linear"], "its kernel_specs must return a list of KernelSpec, got a list with str 'linear'"),
        ([KernelSpec("quantize", "int8", ("cpu",))], "whose compute must be a tuple of texts, got str 'int8'"),  # type: ignore[arg-type]
    ],
)
def test_a_backend_without_specifications_is_disabled(answer: Any, reason: str) -> None:
    found = registry(odd=offering(answering("kernel_specs", answer)))
    assert found.backends() == []
    assert found.disabled["odd (backend odd)"].startswith("backend odd: its kernel_specs ")
    assert found.disabled["odd (backend odd)"].endswith(reason)
    with pytest.raises(BackendError, match="kernel backend 'odd' is installed here and disabled: backend odd: its kernel_specs"):
        found.select(LINEAR_INT8, "odd")


@pytest.mark.parametrize(
    ("method", "answer", "reason"),
    [
        ("unsupported_reasons", raising, "its unsupported_reasons failed with RuntimeError: no compiler"),
        ("unsupported_reasons", "no", "its unsupported_reasons must return a list of texts, got str 'no'"),
        ("unsupported_reasons", None, "its unsupported_reasons must return a list of texts, got NoneType None"),
        ("unsupported_reasons", False, "its unsupported_reasons must return a list of texts, got bool False"),
        ("candidate_configs", None, "its candidate_configs must return a list of KernelConfig, got NoneType None"),
        ("candidate_configs", ["a"], "its candidate_configs must return a list of KernelConfig, got a list with str 'a'"),
        (
            "candidate_configs",
            [],
            "its candidate_configs must return at least one KernelConfig for a request that it takes, got list []",
        ),
    ],
)
def test_wrong_answers_are_told_and_leave_the_request_to_the_others(method: str, answer: Any, reason: str) -> None:
    found = registry(one=offering(answering(method, answer), FakeBackend("other")))
    assert found.answers(LINEAR_INT8)[0].reasons == (reason,)
    assert found.select(LINEAR_INT8)[0].name == "other"
    with pytest.raises(BackendError, match=re.escape(f"backend odd: {reason}")):
        getattr(found.backends()[0], method)(LINEAR_INT8)


def test_a_kernel_that_is_none_is_told() -> None:
    found = registry(one=offering(answering("build", None)))
    with pytest.raises(BackendError) as caught:
        found.backends()[0].build(LINEAR_INT8, KernelConfig())
    assert str(caught.value) == "backend odd: its build must return a function for linear.output, got NoneType None"


def test_errors_of_qsync_pass_as_they_are() -> None:
    class Particular(BackendError):
        for_any_sizes = True

    def refuse(*_: Any) -> Any:
        raise Particular("never")

    with pytest.raises(Particular):
        registry(one=offering(answering("build", refuse))).backends()[0].build(LINEAR_INT8, KernelConfig())


def test_a_backend_that_compiles_ahead_still_does() -> None:
    compiling = type("Compiling", (FakeBackend,), {"compile_ahead": lambda self, requests, arch, progress: (arch, len(requests))})
    one, other = registry(one=offering(compiling("a"), FakeBackend("b"))).backends()
    assert isinstance(one, CompilingBackend)
    assert one.compile_ahead([], "sm_90", lambda done, total, what: None) == ("sm_90", 0)
    assert not isinstance(other, CompilingBackend)


def test_a_backend_that_compiles_in_the_background_still_does() -> None:
    asked: list[str] = []
    ahead = {"compile_ahead": lambda self, requests, arch, progress: None}
    later = {
        "is_compiled": lambda self, request, config: {"old": True, "new": False}.get(config.text),
        "compile_later": lambda self, request, config: asked.append(config.text),
    }
    kinds = [type("Compiling", (FakeBackend,), methods) for methods in (ahead, ahead | later)]
    plain, background = registry(one=offering(kinds[0]("a"), kinds[1]("b"))).backends()
    assert isinstance(plain, BackgroundCompilingBackend)
    assert isinstance(background, BackgroundCompilingBackend)
    assert plain.is_compiled(LINEAR_INT8, KernelConfig("new"))  # there is nothing that it could compile meanwhile
    plain.compile_later(LINEAR_INT8, KernelConfig("new"))
    assert [background.is_compiled(LINEAR_INT8, KernelConfig(text)) for text in ("old", "new")] == [True, False]
    background.compile_later(LINEAR_INT8, KernelConfig("new"))
    assert asked == ["new"]
    with pytest.raises(BackendError, match="backend b: its is_compiled must return True or False, got NoneType None"):
        background.is_compiled(LINEAR_INT8, KernelConfig("other"))


def test_two_backends_of_one_name_are_refused() -> None:
    found = registry(one=offering(FakeBackend("x")), two=offering(FakeBackend("x")))
    with pytest.raises(PluginError, match="plugins one and two both offer a backend 'x'; give one of them another name"):
        found.backends()
    with pytest.raises(PluginError, match="plugin one offers two backends 'x'; give one of them another name"):
        registry(one=offering(FakeBackend("x"), FakeBackend("x"))).backends()


@pytest.mark.parametrize("other", ["qsync-kernels-mine", "z"])  # asked before the owner of the name, and after it
def test_a_built_in_backend_keeps_its_name(other: str) -> None:
    found = registry(
        **{"qsync-torch": offering(own := FakeBackend("aten")), other: offering(FakeBackend("aten"), FakeBackend("b"))}
    )
    assert [backend.name for backend in found.backends()] == ["aten", "b"]
    assert repr(own) in repr(found.backends()[0])
    assert found.disabled == {
        f"{other} (backend aten)": "the name 'aten' is that of a backend of qsync-torch; give it another name"
    }


def test_a_plugin_without_hooks_is_named() -> None:
    module = types.ModuleType("plugin")
    module.qsync_register_backends = lambda: [FakeBackend()]  # type: ignore[attr-defined]
    lines = {line.topic: line for line in registry(module=module, good=offering(FakeBackend())).machine_lines()}
    assert lines["plugin good"].finding == "loaded"
    assert lines["plugin module"] == DoctorLine(
        "plugin module", "loaded, offers nothing", Status.WARNING, "mark its hooks with @hookimpl (docs/hooks.md)"
    )


def test_a_backend_whose_plugin_was_not_imported_is_told_by_the_cause(write_plugin: Callable[[str, str], EntryPoint]) -> None:
    found = Registry.load([write_plugin("qsync_kernels_mine", "import no_such_module_anywhere")])
    assert found.why_disabled("mine") == (
        "kernel backend 'mine': plugin qsync-kernels-mine is disabled: its import failed with ModuleNotFoundError: "
        "No module named 'no_such_module_anywhere'"
    )
    assert found.why_disabled("ine") == ""


def test_versions_of_different_series_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsync_core.plugins.compat.installed_versions", lambda: {"qsync-core": "0.1.3", "qsync-planner": "0.2.0"})
    with pytest.raises(CompatibilityError) as caught:
        Registry.load([])
    assert str(caught.value) == (
        "qsync-planner 0.2.0 does not work with qsync-core 0.1.3: all QSync packages must be of one series; "
        "install the same one, for example: pip install 'qsync-core==0.1.*' 'qsync-planner==0.1.*'"
    )


def hello_command(cli: click.Group) -> None:
    cli.add_command(click.Command("hello"))


def test_commands_of_plugins() -> None:
    def failing(cli: click.Group) -> None:
        cli.add_command(click.Command("half"))
        raise ValueError("oh")

    found = registry(
        a=plugin(qsync_register_commands=hello_command),
        b=plugin(qsync_register_commands=hello_command),
        c=plugin(qsync_register_commands=failing),
        d=plugin(qsync_register_commands=lambda cli: cli.add_command(click.Command("doctor"))),
        e=plugin(qsync_register_commands=lambda: None),
    )
    assert list(found.commands(taken=["doctor"])) == ["hello"]
    assert found.disabled == {
        "b": "it registers the command 'hello', which exists already",
        "c": "its qsync_register_commands failed with ValueError: oh",
        "d": "it registers the command 'doctor', which exists already",
    }


# Choosing a backend


def test_the_name_decides_among_backends_that_were_never_tuned() -> None:
    found = registry(one=offering(FakeBackend("b"), FakeBackend("a"), FakeBackend("0", reasons=("no",))))
    backend, config = found.select(LINEAR_INT8)
    assert (backend.name, config.text) == ("a", "")


@pytest.mark.parametrize(
    ("device", "op", "grad_input", "expected"),
    [
        ("cuda", "linear.output", "bfloat16", "z"),
        ("cuda", "quantize", "bfloat16", "z"),
        ("cuda", "linear.grad_input", "int8", "z"),
        ("cuda", "linear.grad_input", "bfloat16", "aten"),
        ("cuda", "layer_norm.output", "bfloat16", "z"),
        ("cpu", "linear.output", "bfloat16", "aten"),
        ("cpu", "layer_norm.output", "bfloat16", "aten"),
    ],
)
def test_untuned_8_bit_kernels_and_producers_of_a_gpu_are_not_pytorchs_own(
    device: str, op: str, grad_input: str, expected: str
) -> None:
    found = registry(one=offering(FakeBackend("aten"), FakeBackend("z")))
    variant = attrs.evolve(LINEAR_INT8.variant, grad_input=Precision(grad_input))
    assert found.select(attrs.evolve(LINEAR_INT8, op=op, device_kind=device, variant=variant))[0].name == expected


def test_the_lowest_tuned_latency_decides_and_brings_its_configuration(tmp_path: Path) -> None:
    slow, fast = FakeBackend("a", latencies_ns={"x": 9, "y": 8}), FakeBackend("b", latencies_ns={"x": 7, "y": 3})
    untuned = FakeBackend("0")
    store = TuningStore(tmp_path / "tuning.json", "T4", {"torch": "2"})
    for backend in (slow, fast):
        tune(backend, LINEAR_INT8, lambda kernel, request, samples: kernel(), store)
    found = registry(one=offering(slow, fast, untuned))
    backend, config = found.select(LINEAR_INT8, store=store)
    assert (backend.name, config.text) == ("b", "y")
    backend, config = found.select(LINEAR_INT8, "a", store=store)
    assert (backend.name, config.text) == ("a", "y")
    other_shape = attrs.evolve(LINEAR_INT8, shapes=((1, 64), (32, 64)))
    backend, config = found.select(other_shape, store=store)
    assert (backend.name, config.text) == ("0", "")


def test_a_plugin_may_choose() -> None:
    chooser = plugin(qsync_select_backend=lambda request, candidates: candidates[-1].backend)
    silent = plugin(qsync_select_backend=lambda request, candidates: None)
    found = registry(backends=offering(FakeBackend("a"), FakeBackend("b")), chooser=chooser, silent=silent)
    assert found.select(LINEAR_INT8)[0].name == "b"
    liar = registry(backends=offering(FakeBackend("a")), chooser=plugin(qsync_select_backend=lambda request, candidates: "z"))
    with pytest.raises(BackendError, match=r"a plugin chose the backend 'z' for linear\.output; it can only be a"):
        liar.select(LINEAR_INT8)


def test_a_named_backend_is_never_replaced() -> None:
    found = registry(one=offering(FakeBackend("a"), FakeBackend("b", reasons=("K must be a multiple of 16", "no GPU"))))
    with pytest.raises(BackendError) as caught:
        found.select(LINEAR_INT8, "b")
    assert str(caught.value) == (
        "no kernel backend can run linear.output in int8>float32 of shapes [(128, 64), (32, 64)] on cpu "
        "(b: K must be a multiple of 16, no GPU)"
    )
    found.disabled["of_c"] = "its import failed"
    with pytest.raises(
        BackendError, match="there is no kernel backend 'c' here; installed are a, b; plugin of_c is disabled: its import"
    ):
        found.select(LINEAR_INT8, "c")


def test_a_request_that_nobody_takes_is_answered_with_every_reason() -> None:
    found = registry(one=offering(FakeBackend("b", reasons=("too old",)), FakeBackend("a", reasons=("too new",))))
    with pytest.raises(BackendError, match=r"\(a: too new; b: too old\)"):
        found.select(LINEAR_INT8)
    with pytest.raises(BackendError, match=r"no kernel backend is installed that could run .*; install qsync-torch"):
        registry().select(LINEAR_INT8)


def test_answers_say_what_each_backend_would_do(tmp_path: Path) -> None:
    tuned, refusing, untuned = FakeBackend("a", latencies_ns={"x": 9, "y": 8}), FakeBackend("b", reasons=("no",)), FakeBackend("c")
    store = TuningStore(tmp_path / "tuning.sqlite", "T4", {})
    tune(tuned, LINEAR_INT8, lambda kernel, request, samples: kernel(), store)
    found = registry(one=offering(tuned, refusing, untuned))
    assert found.answers(LINEAR_INT8, store=store) == [Answer("a", (), "y", 8, True), Answer("b", ("no",)), Answer("c")]
    near = attrs.evolve(LINEAR_INT8, shapes=((256, 64), (32, 64)))
    assert found.answers(near, ["a"], store=store) == [Answer("a", (), "y", 16, False)]
    assert found.answers(LINEAR_INT8, ["a"]) == [Answer("a", (), "x")]
    assert found.choose(LINEAR_INT8, found.answers(LINEAR_INT8, store=store)).backend == "a"


def test_a_backend_that_fails_when_asked_leaves_the_request_to_the_others() -> None:
    class Careless(FakeBackend):
        def unsupported_reasons(self, request: KernelRequest) -> list[str]:
            raise IndexError("tuple index out of range")

    found = registry(one=offering(Careless("a"), FakeBackend("b")))
    assert found.answers(LINEAR_INT8)[0].reasons == ("its unsupported_reasons failed with IndexError: tuple index out of range",)
    assert found.select(LINEAR_INT8)[0].name == "b"


def test_backends_have_the_version_of_their_distribution(write_plugin: Callable[[str, str], EntryPoint]) -> None:
    found = registry(one=offering(FakeBackend("a")))
    assert found.backend_versions() == {}
    found._distributions["one"] = "pytest"
    assert found.backend_versions() == {"a": pytest.__version__}


def test_a_plugin_that_hangs_at_its_import_is_named_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    named, told = threading.Event(), io.StringIO()

    class Stderr:
        def write(self, text: str) -> None:
            told.write(text)
            if "\n" in text:
                named.set()

        def flush(self) -> None: ...

    class Hanging:
        name, value, dist = "hanging-plugin", "hanging:plugin", None

        def load(self) -> types.ModuleType:
            assert named.wait(60)
            return plugin()

    monkeypatch.setattr(registry_module, "_SLOW_IMPORT_S", 0.0)
    monkeypatch.setattr("sys.stderr", Stderr())
    assert Registry.load([Hanging()]).plugins == ["hanging-plugin"]
    assert told.getvalue().startswith(
        "note: the import of plugin hanging-plugin (of hanging:plugin) has taken 0 s and goes on; where it"
    )
    assert "Ctrl-C and uninstall the plugin" in told.getvalue()
