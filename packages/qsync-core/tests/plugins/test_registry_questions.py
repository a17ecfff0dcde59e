"""Hooks that answer a question: the first answer counts, and whoever fails to answer is disabled."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from backend_doubles import LINEAR_INT8, FakeBackend
from plugin_doubles import offering, plugin, registry

from qsync_core.errors import BackendError, QSyncError
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.plugins.hooks import DeviceFacts, hookimpl
from qsync_core.plugins.registry import Registry

GRAPH = PrecisionDag("resnet50", (Operator(OpId("$input.x"), "input", OpClass.FIXED, (), (), (1,)),), ())
TRUTH = Observations("resnet50", "0" * 64, (), 8, "budget", ())


def test_jobs_and_devices_are_answered_by_the_first_plugin_that_knows() -> None:
    facts = DeviceFacts("cuda", "T4", "7.5", {"torch": "2"})
    silent = plugin(qsync_trace_job=lambda job: None, qsync_describe_device=lambda device: None)
    knowing = plugin(qsync_trace_job=lambda job: attrs.evolve(GRAPH, model=job), qsync_describe_device=lambda device: facts)
    found = registry(a=knowing, b=silent)
    assert found.trace_job("vgg16") == attrs.evolve(GRAPH, model="vgg16")
    assert found.describe_device("cuda") == facts
    assert registry(b=silent).trace_job("resnet50") is None
    assert registry().describe_device("cuda") is None


def test_the_truth_is_measured_by_the_first_plugin_that_knows_the_job() -> None:
    silent = plugin(qsync_measure_truth=lambda request: None)
    knowing = plugin(qsync_measure_truth=lambda request: TRUTH)
    assert registry(a=knowing, b=silent).measure_truth(None) is TRUTH  # type: ignore[arg-type]
    assert registry(b=silent).measure_truth(None) is None  # type: ignore[arg-type]


def asked(found: Registry, hook: str) -> Any:
    """The answer to one of the questions that the first plugin that knows answers."""
    if hook == "qsync_trace_job":
        return found.trace_job("resnet50")
    if hook == "qsync_describe_device":
        return found.describe_device("cpu")
    if hook == "qsync_measure_truth":
        return found.measure_truth(None)  # type: ignore[arg-type]
    return found.select(LINEAR_INT8)[0].name


QUESTIONS = {
    "qsync_trace_job": (GRAPH, "PrecisionDag"),
    "qsync_describe_device": (DeviceFacts("cpu", "", "", None), "DeviceFacts"),
    "qsync_measure_truth": (TRUTH, "Observations"),
    "qsync_select_backend": ("a", "str"),
}


@pytest.mark.parametrize("hook", QUESTIONS)
def test_who_fails_to_answer_is_disabled_and_the_next_is_asked(hook: str) -> None:
    answer, _ = QUESTIONS[hook]

    def failing(*arguments: Any) -> Any:
        raise ZeroDivisionError("by\nzero")

    def leaving(*arguments: Any) -> Any:
        raise SystemExit(3)

    backends = offering(FakeBackend("a"))
    knowing = plugin(**{hook: lambda: answer})
    # Asked in the order c, b, a.
    found = registry(backends=backends, a=knowing, b=plugin(**{hook: leaving}), c=plugin(**{hook: failing}))
    assert asked(found, hook) == answer
    assert found.disabled == {
        "b": f"its {hook} failed with SystemExit: 3",
        "c": f"its {hook} failed with ZeroDivisionError: by zero",
    }
    assert asked(found, hook) == answer


@pytest.mark.parametrize("hook", QUESTIONS)
def test_who_answers_something_else_is_disabled_and_the_next_is_asked(hook: str) -> None:
    answer, kind = QUESTIONS[hook]
    found = registry(backends=offering(FakeBackend("a")), a=plugin(**{hook: lambda: answer}), b=plugin(**{hook: lambda: 5}))
    assert asked(found, hook) == answer
    assert found.disabled == {"b": f"its {hook} must return {kind} or None, got int"}


def test_what_is_wrong_with_a_job_is_told_as_it_is() -> None:
    def refusing(job: str) -> PrecisionDag:
        raise QSyncError(f"there is no job {job}")

    found = registry(a=plugin(qsync_trace_job=lambda job: GRAPH), b=plugin(qsync_trace_job=refusing))
    with pytest.raises(QSyncError, match=r"^there is no job resnet50$"):
        found.trace_job("resnet50")
    assert found.disabled == {}


def test_a_plugin_that_fails_to_choose_takes_its_backends_along() -> None:
    def failing() -> str:
        raise KeyError("latency")

    both = plugin(qsync_register_backends=lambda: [FakeBackend("a")], qsync_select_backend=failing)
    assert registry(both=both, other=offering(FakeBackend("b"))).select(LINEAR_INT8)[0].name == "b"
    with pytest.raises(
        BackendError,
        match=r"no kernel backend is installed that could run .*; "
        r"plugin both is disabled: its qsync_select_backend failed with KeyError: 'latency'$",
    ):
        registry(both=both).select(LINEAR_INT8)


def test_something_unusable_is_left_out_alone_and_a_wrapper_is_refused() -> None:
    def problem(offered: Any) -> str:
        return "" if offered.upper() != "BAD" else "it is bad"

    found = registry(
        a=plugin(qsync_register_indicators=lambda: ["one", "bad", "two"]),
        b=plugin(qsync_register_indicators=lambda: [3, "three"]),
        c=plugin(qsync_register_indicators=lambda: ["four"]),
    )
    assert found.collect("qsync_register_indicators", problem) == ["one", "two", "four"]
    assert found.disabled == {
        "a (builtins.str)": "it is bad",
        "b": "what it offers, builtins.int, failed with AttributeError: 'int' object has no attribute 'upper'",
    }

    class Wrapping:
        @hookimpl(wrapper=True)
        def qsync_trace_job(self, job: str) -> Any:
            return (yield)

    wrapped = registry(a=plugin(qsync_trace_job=lambda job: GRAPH), b=Wrapping())
    assert wrapped.trace_job("resnet50") == GRAPH
    assert wrapped.disabled == {
        "b": "its hooks do not fit: qsync_trace_job is a wrapper, which QSync's hooks do not have; see docs/hooks.md"
    }
