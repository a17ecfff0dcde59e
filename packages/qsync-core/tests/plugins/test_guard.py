"""What a plugin may do to a command: nothing but be named; the user's own Ctrl-C passes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import click
import pytest
from backend_doubles import LINEAR_INT8, FakeBackend
from click.testing import CliRunner
from plugin_doubles import offering, plugin, registry

from qsync_core.cli.root import cli
from qsync_core.errors import BackendError, QSyncError
from qsync_core.kernels.backend import KernelConfig
from qsync_core.plugins.doctor import DoctorLine
from qsync_core.plugins.guard import guard
from qsync_core.plugins.registry import Registry


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit: 3": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "StopIteration: 5": StopIteration(5),
    "ValueError: two lines": ValueError("two\nlines"),
    "Unspeakable: (its text cannot be read)": Unspeakable(),
    "RecursionError": RecursionError(),
}


@pytest.fixture(params=ERRORS)
def said(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _ctrl_c_as_python_has_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def raising(said: str) -> Callable[..., NoReturn]:
    """A function that takes anything, prints, and raises the error that is described so."""

    def fail(*arguments: Any) -> NoReturn:
        print("noise")
        raise ERRORS[said]

    return fail


def nothing(sentence: str, error: BaseException) -> None:
    """The body ends there, and the program goes on."""


CALLS: dict[str, Callable[[Registry], Any]] = {
    "qsync_register_backends": lambda found: found.backends(),
    "qsync_register_commands": lambda found: found.commands(),
    "qsync_register_indicators": lambda found: found.collect_named("qsync_register_indicators", "indicator", lambda offered: ""),
    "qsync_register_collectors": lambda found: found.collect_named("qsync_register_collectors", "collector", lambda offered: ""),
    "qsync_doctor": lambda found: found.doctor_lines(),
    "qsync_trace_job": lambda found: found.trace_job("resnet50"),
    "qsync_describe_device": lambda found: found.describe_device("cpu"),
    "qsync_doctor_job": lambda found: found.doctor_job(30),
    "qsync_measure_truth": lambda found: found.measure_truth(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_that_raises_anything_is_named_and_standard_output_stays_clean(
    hook: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = registry(bad=plugin(**{hook: lambda: raising(said)()}), good=plugin(qsync_doctor=lambda: [DoctorLine("a", "b")]))
    assert not CALLS[hook](found) or hook == "qsync_doctor"
    assert found.disabled == {"bad": f"its {hook} failed with {said}"}
    assert found.doctor_lines() == [DoctorLine("a", "b")]
    assert capsys.readouterr() == ("", "noise\n")


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_that_returns_nonsense_is_named(hook: str) -> None:
    found = registry(bad=plugin(**{hook: lambda: 5}))
    assert not CALLS[hook](found)
    if hook != "qsync_register_commands":  # what that returns is not looked at
        assert found.disabled["bad"].startswith(f"its {hook} must return ")


def test_a_choice_that_raises_anything_is_left_to_the_next(said: str) -> None:
    found = registry(backends=offering(FakeBackend("a")), bad=plugin(qsync_select_backend=raising(said)))
    assert found.select(LINEAR_INT8)[0].name == "a"
    assert found.disabled == {"bad": f"its qsync_select_backend failed with {said}"}


METHODS: dict[str, tuple[Any, ...]] = {
    "unsupported_reasons": (LINEAR_INT8,),
    "candidate_configs": (LINEAR_INT8,),
    "build": (LINEAR_INT8, KernelConfig()),
    "compile_ahead": ([], "sm_90", print),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_backend_that_raises_anything_is_named(method: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    methods = {"compile_ahead": lambda *arguments: None, method: raising(said)}
    (backend,) = registry(one=offering(type("Bad", (FakeBackend,), methods)("bad"))).backends()
    with pytest.raises(BackendError) as caught:
        getattr(backend, method)(*METHODS[method])
    assert str(caught.value) == f"backend bad: its {method} failed with {said}"
    assert capsys.readouterr() == ("", "noise\n")


class Slippery(list[Any]):
    """A list that cannot be looked at."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise SystemExit(4)


@pytest.mark.parametrize(("method", "said"), [("candidate_configs", "KeyboardInterrupt"), ("build", "SystemExit: 4")])
def test_an_answer_that_fails_when_it_is_looked_at_is_the_backends_failure(method: str, said: str) -> None:
    (backend,) = registry(one=offering(type("Bad", (FakeBackend,), {method: lambda *_: Slippery([1])})("bad"))).backends()
    with pytest.raises(BackendError, match=f"^backend bad: its {method} failed with {said}$"):
        getattr(backend, method)(*METHODS[method])


def test_a_backend_whose_name_raises_is_left_out_alone() -> None:
    class Nameless(FakeBackend):
        def __getattribute__(self, name: str) -> Any:
            raise KeyboardInterrupt

    found = registry(odd=offering(Nameless(), FakeBackend("good")))
    assert [backend.name for backend in found.backends()] == ["good"]
    assert list(found.disabled.values()) == ["looking at it failed with KeyboardInterrupt"]


# Commands


@pytest.fixture
def qsync(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs ``qsync`` with one plugin, which has these hooks."""

    def run(*arguments: str, **hooks: Any) -> Any:
        found = Registry()
        found.register(plugin(**hooks), "mine")
        monkeypatch.setattr(Registry, "load", staticmethod(lambda: found))
        cli.__dict__.pop("registry", None)
        cli.__dict__.pop("_plugin_commands", None)
        try:
            return CliRunner().invoke(cli, arguments)
        finally:
            cli.__dict__.pop("registry", None)
            cli.__dict__.pop("_plugin_commands", None)

    return run


def adding(run: Callable[[], Any]) -> Callable[[click.Group], None]:
    """A hook that registers the command ``mine``."""

    def register(cli: click.Group) -> None:
        cli.command("mine")(run)

    return register


def test_a_command_that_raises_anything_but_an_exit_is_named(qsync: Any, said: str) -> None:
    result = qsync("mine", qsync_register_commands=adding(lambda: raising(said)()))
    assert result.stdout == "noise\n"  # a command prints on standard output
    if said == "SystemExit: 3":
        assert (result.exit_code, result.stderr) == (3, "")
        return
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0].startswith("Traceback")
    assert result.stderr.splitlines()[-1] == f"error: plugin mine: its command mine failed with {said}"


def test_errors_for_the_user_leave_a_command_as_they_are(qsync: Any) -> None:
    def refuse() -> None:
        raise QSyncError("there is no job x")

    def misuse() -> None:
        raise click.UsageError("no such thing")

    assert qsync("mine", qsync_register_commands=adding(refuse)).stderr == "error: there is no job x\n"
    assert qsync("mine", qsync_register_commands=adding(misuse)).exit_code == 2


def test_json_stays_one_object_whatever_plugins_print(qsync: Any) -> None:
    def chatty() -> list[DoctorLine]:
        print("looking for compilers ...")
        return [DoctorLine("mine", "here")]

    def broken() -> list[Any]:
        print("no backends")
        raise SystemExit(0)

    result = qsync("doctor", "--json", qsync_doctor=chatty, qsync_register_backends=broken)
    lines = json.loads(result.stdout)["lines"]
    assert {"topic": "mine", "finding": "here", "status": "ok", "advice": ""} in lines
    assert any(line["finding"] == "disabled: its qsync_register_backends failed with SystemExit: 0" for line in lines)
    assert "looking for compilers ...\n" in result.stderr


def test_what_is_registered_as_a_command_and_is_none_is_named(qsync: Any) -> None:
    result = qsync("--help", qsync_register_commands=lambda cli: cli.commands.update(mine=5))
    assert result.exit_code == 0
    assert "plugin mine is disabled: what it registers as 'mine' is no click command" in result.stderr


def test_a_doctor_line_of_something_else_than_text_is_refused() -> None:
    found = registry(bad=plugin(qsync_doctor=lambda: [DoctorLine("a", 5)]))  # type: ignore[arg-type]
    assert found.doctor_lines() == []
    assert found.disabled["bad"].startswith("its qsync_doctor failed with TypeError: ")


# The user's own Ctrl-C


def press_ctrl_c(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def swallow(*_: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        press_ctrl_c()


def change(*_: Any) -> None:
    try:
        press_ctrl_c()
    except KeyboardInterrupt:
        raise ValueError("I do not stop") from None


@pytest.mark.parametrize("pressed", [press_ctrl_c, swallow, change])
@pytest.mark.parametrize("hook", CALLS)
def test_a_real_ctrl_c_ends_the_command_whatever_the_plugin_makes_of_it(hook: str, pressed: Callable[..., None]) -> None:
    found = registry(slow=plugin(**{hook: lambda: pressed()}))
    before = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        CALLS[hook](found)
    assert found.disabled == {}
    assert sys.stdout is before


def test_a_real_ctrl_c_leaves_nested_guards() -> None:
    with pytest.raises(KeyboardInterrupt), guard("outer", nothing), guard("inner", nothing, passing=(QSyncError,)):
        press_ctrl_c()


@pytest.mark.parametrize(("pressed", "code"), [(press_ctrl_c, 1), (swallow, 0)])
def test_a_command_may_treat_ctrl_c_itself(qsync: Any, pressed: Callable[..., None], code: int) -> None:
    result = qsync("mine", qsync_register_commands=adding(lambda: pressed()))
    assert result.exit_code == code
    assert "plugin" not in result.stderr
    assert ("Aborted!" in result.stderr) == (code == 1)


def test_a_handler_of_the_program_that_does_not_raise_stays_in_charge() -> None:
    heard: list[int] = []
    handler = lambda number, frame: heard.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    with guard("it", nothing):
        press_ctrl_c()
    assert (heard, signal.getsignal(signal.SIGINT)) == ([signal.SIGINT], handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_a_plugin_leaves_behind_is_taken_away() -> None:
    with guard("it", nothing):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_guards_of_several_threads_give_standard_output_back() -> None:
    before, inside, leave = sys.stdout, threading.Event(), threading.Event()

    def other() -> None:
        with guard("other", nothing):
            inside.set()
            leave.wait(10)
            raise KeyboardInterrupt

    thread = threading.Thread(target=other)
    with guard("first", nothing):
        thread.start()
        assert inside.wait(10)
    assert sys.stdout is sys.stderr  # the other thread is still inside
    leave.set()
    thread.join()
    assert sys.stdout is before
