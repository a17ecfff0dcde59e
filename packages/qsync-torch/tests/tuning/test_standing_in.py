"""Kernels that are still to be compiled: who runs meanwhile, what is said, and where nobody stands in."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from forked import run_forked
from qsync_core.errors import BackendError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes, operator_requests
from qsync_core.tuning.record import TuningRecord
from qsync_torch import apply_
from qsync_torch.apply import kernel_check
from qsync_torch.job import Batch, Job
from qsync_torch.kernels import canary as canaries
from qsync_torch.kernels import selection
from qsync_torch.kernels.canary import Canary
from qsync_torch.kernels.installed import open_store
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning import job_tuning

from .installed_backends import PRODUCTS, LateBackend, NamedBackend

INT8 = Variant.parse("int8>float32")
CALL = CallShapes("linear", (3, 100), (16, 100), (3, 16))
PINNED = "&".join(f"{op}=late/b" for op in PRODUCTS) + "&quantize=ready/a&quantize.weight=ready/"


@pytest.fixture(autouse=True)
def fresh_words():
    selection._say_once.cache_clear()
    yield
    selection._say_once.cache_clear()


def net():
    return nn.Sequential(nn.Linear(100, 16), nn.ReLU(), nn.Linear(16, 2))


def assigned(backend, config="", op="0"):
    return {OpId(op): Assignment(INT8, backend, config, "")}


def step(model):
    model(torch.randn(3, 100, requires_grad=True)).square().mean().backward()


def tuned(backend, config, latency_ns):
    store = open_store(torch.device("cpu"))
    for asked in operator_requests(CALL, INT8, "cpu"):
        if asked.role in PRODUCTS:
            store.add(TuningRecord(store.key(backend, asked.request), config, latency_ns))


def test_another_backend_of_the_chain_runs_until_the_next_start_and_that_is_said_once(install):
    late, ready = LateBackend(), NamedBackend("ready")
    install(late, ready)
    model = net()
    apply_(model, assigned("late+ready+aten") | assigned("late+ready+aten", op="2"))
    with warnings.catch_warnings(record=True, action="always") as caught:
        step(model)
        step(model)
    assert [str(warning.message) for warning in caught] == [
        "late has yet to compile kernels of this model for this device: until the next start ready runs in their place, perhaps "
        "slower than predicted, while the compilers work beside the training (QSYNC_WAIT_FOR_KERNELS=1 waits for them)"
    ]
    assert sorted(late.asked) == sorted((op, "a") for op in PRODUCTS)
    assert late.built == []
    assert {op for op, _ in ready.ran} == {"quantize", *PRODUCTS}


def test_the_next_start_runs_what_was_compiled(install):
    late, ready = LateBackend(cache=[(op, "a") for op in PRODUCTS]), NamedBackend("ready")
    install(late, ready)
    model = net()
    apply_(model, assigned("late+ready+aten"))
    with warnings.catch_warnings(action="error"):
        step(model)
    assert {op for op, _ in late.ran} == set(PRODUCTS)
    assert late.asked == []


def test_auto_takes_the_fastest_of_the_others(install):
    """The fastest is still to be compiled, and another one that compiles is not ready either."""
    late, slow, ready = LateBackend(), NamedBackend("a-slow"), NamedBackend("ready")
    install(late, slow, ready)
    for backend, config, latency_ns in (("late", "b", 10), ("ready", "b", 20), ("a-slow", "a", 30)):
        tuned(backend, config, latency_ns)
    model = net()
    apply_(model, assigned("auto"))
    with pytest.warns(UserWarning, match="until the next start ready runs in their place"):
        step(model)
    assert sorted(late.asked) == sorted((op, "b") for op in PRODUCTS)
    assert {op for op, config in ready.ran if config == "b"} == set(PRODUCTS)


@pytest.mark.parametrize("chain", ["late+quantizes", "late+quantizes+aten"])
def test_where_only_the_reference_could_stand_in_the_compiler_is_waited_for(install, chain):
    late, quantizes = LateBackend(), NamedBackend("quantizes", refuses=dict.fromkeys(PRODUCTS, "not offered"))
    install(late, quantizes, NamedBackend("ready"))  # which the plan does not name
    model = net()
    apply_(model, assigned(chain))
    with warnings.catch_warnings(action="error"):
        step(model)
    assert {op for op, _ in late.ran} == set(PRODUCTS)
    assert late.asked == []


def test_a_backend_that_has_to_compile_itself_does_not_stand_in(install):
    late, later = LateBackend(), LateBackend()
    later.name = "later"
    install(late, later, NamedBackend("quantizes", refuses=dict.fromkeys(PRODUCTS, "not offered")))
    model = net()
    apply_(model, assigned("late+later+quantizes"))
    step(model)
    assert {op for op, _ in late.ran} == set(PRODUCTS)
    assert later.ran == []


def test_pinned_kernels_are_begun_at_apply_all_at_once_and_none_is_waited_for(install, monkeypatch):
    late, ready = LateBackend(cache=[("linear.output", "b")]), NamedBackend("ready")
    install(late, ready)
    prebuild = kernel_check.prebuild
    monkeypatch.setattr(kernel_check, "device_facts", lambda device: ("cpu", ""))
    monkeypatch.setattr(
        "qsync_torch.apply.planned_model.prebuild", lambda addressed, device, caller: prebuild(addressed, torch.device("cuda"))
    )
    model = net()
    with pytest.warns(UserWarning, match="until the next start ready runs in their place"):
        apply_(model, assigned("late+ready", PINNED))
    assert sorted(late.asked) == [("linear.grad_input", "b"), ("linear.grad_weight", "b")]
    assert late.built == [("linear.output", "b")]
    late.cache |= {(op, "b") for op in PRODUCTS[:1]}
    step(model)
    assert {op for op, _ in late.ran} == {"linear.output"}
    assert {op for op, _ in ready.ran} == {"quantize", "linear.grad_input", "linear.grad_weight"}


def test_a_smaller_batch_that_the_pinned_configuration_does_not_take_waits_for_no_compiler_either(install):
    class Picky(LateBackend):
        def build(self, request, config):
            if config.text == "b" and request.shapes[0][0] % 2:
                raise BackendError("configuration b takes an even number of rows")
            return super().build(request, config)

    late, ready = Picky(cache=[("linear.output", "b")]), NamedBackend("ready")
    install(late, ready)
    model = net()
    apply_(model, assigned("late+ready", "linear.output=late/b"))
    model(torch.randn(4, 100))
    with warnings.catch_warnings(record=True, action="always") as caught:
        model(torch.randn(3, 100))
    assert ["even number of rows; it runs there with a instead" in str(one.message) for one in caught] == [True, False]
    assert late.asked == [("linear.output", "a")]
    assert ("linear.output", "a") in ready.ran


def test_a_script_may_wait(install, monkeypatch):
    late, ready = LateBackend(), NamedBackend("ready")
    install(late, ready)
    model = net()
    monkeypatch.setenv("QSYNC_WAIT_FOR_KERNELS", "1")
    apply_(model, assigned("late+ready"))
    step(model)
    assert {op for op, _ in late.ran} == set(PRODUCTS)
    monkeypatch.setenv("QSYNC_WAIT_FOR_KERNELS", "yes")
    with pytest.raises(BackendError, match=r"QSYNC_WAIT_FOR_KERNELS is 1 \(wait for compilers\) or 0 .*, got 'yes'"):
        model(torch.randn(5, 100))


def test_a_profile_measures_the_kernels_that_it_names(install):
    late, ready = LateBackend(), NamedBackend("ready")
    install(late, ready)
    job = Job(
        "tiny",
        net(),
        lambda step, size: Batch((torch.randn(size, 100),), target=torch.randn(size, 2)),
        lambda output, batch: nn.functional.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    found = profile(job, trace(job), ProfileRequest(ladder=(INT8,), backend="late+ready+aten"))
    named = {cost.config for cost in found.costs if "late" in cost.backend}
    assert named
    assert {op for op, _ in late.ran} == set(PRODUCTS)
    assert {op for op, _ in ready.ran} == {"quantize"}
    assert late.asked == []


def test_the_canary_checks_and_names_what_runs(install, monkeypatch):
    late, ready = LateBackend(), NamedBackend("ready")
    install(late, ready)
    monkeypatch.setattr(canaries, "problem_of_call", lambda asked, arguments: "it is off")
    with pytest.warns(UserWarning, match="until the next start ready runs"):
        wrong = Canary(torch.device("cpu")).of_operator(CALL, INT8, KernelChoice.parse("late+ready", PINNED))
    assert {(kernel.role, kernel.backend) for kernel in wrong} >= {(op, "ready") for op in PRODUCTS}
    assert late.ran == []


def test_what_a_plan_pins_is_compiled_on_a_machine_that_measured_nothing(install, monkeypatch):
    """Once a kernel: both layers share those of their products, and what only PyTorch runs is nobody's to compile."""
    late, ready = LateBackend(), NamedBackend("ready")
    install(late, ready)
    job = Job(
        "tiny",
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)),
        lambda step, size: Batch((torch.randn(size, 8),), target=torch.randn(size, 2)),
        lambda output, batch: nn.functional.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    monkeypatch.setattr(job_tuning, "device_facts", lambda device: ("cpu", ""))
    float32 = Assignment(Variant.parse("float32"), "aten", "", "")
    assignments = {**assigned("late+ready", PINNED, "2"), **assigned("late+ready", PINNED, "4"), OpId("0"): float32}
    told = []
    job_tuning.compile_planned(trace(job), assignments, torch.device("cuda"), lambda *update: told.append(update))
    assert sorted(late.built) == sorted((op, "b") for op in PRODUCTS)
    assert ready.built == []
    assert told == [(done, 3, "3 kernels") for done in range(3)]
    job_tuning.compile_planned(trace(job), assignments, torch.device("cpu"))
    assert len(late.built) == 3


@pytest.mark.distributed
def test_ranks_of_different_readiness_train_one_model(tmp_path):
    """Rank 0 has the compiled kernels, rank 1 not: each runs its own, only rank 1 says so, and weights stay equal."""
    script = str(Path(__file__).parent / "unready_rank.py")
    ranks = [[script, str(rank), str(tmp_path)] for rank in range(2)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = run_forked(ranks, [environment] * 2, cwd=tmp_path, timeout_s=300)
    assert [one.status for one in ended] == [0, 0], ended
    ready, unready = (json.loads(one.output.splitlines()[-1]) for one in ended)
    assert (ready["late"], ready["asked"]) == (sorted(PRODUCTS), [])
    assert (unready["late"], unready["asked"]) == ([], sorted(PRODUCTS))
    assert ready["weights"] == unready["weights"]
    assert ["has yet to compile" in one.output for one in ended] == [False, True]
