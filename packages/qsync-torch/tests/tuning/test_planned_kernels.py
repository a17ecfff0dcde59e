"""A plan's kernels: the pinned ones run, a missing or refusing one stops the run before its first step, auto chooses here."""

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import BackendError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.requests import CallShapes, operator_requests
from qsync_core.tuning.record import TuningRecord
from qsync_torch import apply_
from qsync_torch.apply import kernel_check as planned_kernels
from qsync_torch.apply.planned_modules import is_planned
from qsync_torch.kernels import selection as kernel_selection
from qsync_torch.kernels.installed import open_store

from .installed_backends import CompilingNamedBackend, NamedBackend

INT8, BFLOAT16 = Variant.parse("int8>float32"), Variant.parse("bfloat16>float32")
# An empty configuration is the first candidate.
PINNED = "linear.output=one/b&linear.grad_input=one/&linear.grad_weight=two/b&quantize=two/b&quantize.weight=one/a"


def net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same", stride=1), nn.Flatten(), nn.Linear(4 * 25, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def assigned(**entries):
    return {OpId(fqn[1:]): Assignment(variant, backend, config, "") for fqn, (variant, backend, config) in entries.items()}


def step(model):
    x = torch.randn(3, 3, 5, 5)
    model(x).square().mean().backward()


def test_the_pinned_kernels_run_forward_and_backward(install):
    one, two = NamedBackend("one"), NamedBackend("two")
    install(one, two)
    model = net()
    apply_(model, assigned(_2=(INT8, "one+two", PINNED)))
    step(model)
    assert sorted(one.ran) == [("linear.grad_input", "a"), ("linear.output", "b"), ("quantize", "a")]
    assert sorted(two.ran) == [("linear.grad_weight", "b"), ("quantize", "b")]


def test_without_a_choice_the_first_of_the_chain_runs_its_first_candidate(install):
    one, two = NamedBackend("one", refuses={"grad_weight": "no"}), NamedBackend("two", configs=("x",))
    install(one, two)
    model = net()
    apply_(model, assigned(_2=(INT8, "one+two", "")))
    step(model)
    assert {config for _, config in one.ran} == {"a"}
    assert two.ran == [("linear.grad_weight", "x")]


def test_a_missing_backend_stops_the_run_before_its_first_step(install):
    install(NamedBackend("one"))
    model = net()
    plan = assigned(_0=(INT8, "one+three", ""), _2=(INT8, "one+aten", "quantize=four/x"), _4=(BFLOAT16, "aten", ""))
    with pytest.raises(BackendError) as caught:
        apply_(model, plan)
    missing = "kernel backend {!r} is not installed here (found: aten, one); install the package that "
    missing += "provides it, or name another backend"
    assert str(caught.value) == (
        "2 of 3 operators cannot run on cpu as they are planned: "
        f"0#0: {missing.format('three')}; 2#0: {missing.format('four')}; "
        "install what is missing, plan again on this machine, or say which kernels to take instead: "
        "apply_(..., backend='auto') takes the fastest that are installed, backend='aten' PyTorch's own"
    )
    assert not any(map(is_planned, model.modules()))


def test_an_error_of_a_kernel_in_training_says_whose_it_is(install):
    class Broken(NamedBackend):
        def build(self, request, config):
            return fails

    def fails(*arguments):
        raise ZeroDivisionError("my kernel broke")

    install(Broken("mine", refuses={"quantize": "no", "output": "no"}))
    model = nn.Sequential(nn.Linear(6, 4))
    apply_(model, assigned(_0=(INT8, "mine+aten", "")))
    loss = model(torch.randn(4, 6)).sum()
    with pytest.raises(ZeroDivisionError, match="my kernel broke") as caught:
        loss.backward()
    assert caught.value.__notes__ == ["raised by the kernel of linear.grad_weight of backend mine"]


def test_a_disabled_backend_is_named_with_the_reason(install):
    old = NamedBackend("old")
    old.api_version = 0
    install(old)
    with pytest.raises(BackendError, match="kernel backend 'old' is installed here and disabled: its backend API version is 0"):
        apply_(net(), assigned(_2=(INT8, "old", "")))


def test_a_backend_that_fails_when_asked_is_named(install, monkeypatch):
    broken = NamedBackend("broken")
    install(broken)
    monkeypatch.setattr(broken, "unsupported_reasons", lambda request: 1 / 0)
    with pytest.raises(BackendError, match="backend broken: its unsupported_reasons failed with ZeroDivisionError"):
        apply_(net(), assigned(_2=(INT8, "broken+aten", "")))
    step_of = net()
    apply_(step_of, assigned(_2=(INT8, "auto", "")))
    step(step_of)
    monkeypatch.setattr(broken, "unsupported_reasons", lambda request: [])
    monkeypatch.setattr(broken, "build", lambda request, config: None)
    model = net()
    apply_(model, assigned(_2=(INT8, "broken", "")))
    with pytest.raises(BackendError, match="backend broken: its build must return a function for quantize, got NoneType None"):
        step(model)


def test_an_operator_that_does_not_exist_can_not_be_pinned(install):
    install(NamedBackend("one"))
    with pytest.raises(BackendError, match=r"a choice of kernels is for one of .*linear.output.*; got 'linear.outpt'"):
        apply_(net(), assigned(_2=(INT8, "one", "linear.outpt=one/a")))


def test_refusals_of_backward_kernels_stop_it_too_with_all_reasons(install):
    install(
        NamedBackend("one", refuses={"grad_input": "too narrow", "conv2d.grad_weight": "not offered"}),
        NamedBackend("two", refuses={"grad_input": "too wide", "grad_weight": "no"}),
    )
    model = net()
    plan = assigned(_0=(INT8, "one+two", ""), _2=(INT8, "one+two", ""), _4=(INT8, "one+two", "linear.grad_weight=two/a"))
    with pytest.raises(BackendError) as caught:
        apply_(model, plan)
    message = str(caught.value)
    assert message.startswith("3 of 3 operators cannot run on cpu as they are planned: ")
    assert "0#0: conv2d.grad_input as int8>float32 (one: too narrow; two: too wide)" in message
    assert "0#0: conv2d.grad_weight as int8>float32 (one: not offered; two: no)" in message
    assert "2#0, 4#0: linear.grad_input as int8>float32 (one: too narrow; two: too wide)" in message
    assert "4#0: linear.grad_weight as int8>float32 (two: no)" in message


def test_float_formats_do_not_run_silently_on_aten(install):
    install(NamedBackend("one"))
    with pytest.raises(BackendError, match=r"4#0: as bfloat16>float32 it runs PyTorch's own kernels \(backend aten\), and one"):
        apply_(net(), assigned(_2=(INT8, "one", ""), _4=(BFLOAT16, "one", "")))
    apply_(net(), assigned(_2=(INT8, "one", ""), _4=(BFLOAT16, "one+aten", "")))
    with pytest.raises(BackendError, match=r"4#0: as bfloat16>float32 it runs PyTorch's own kernels"):
        apply_(net(), {OpId("4"): BFLOAT16}, backend="one")


def test_functional_calls_are_asked_for_too(install):
    install(NamedBackend("one", refuses={"grad_weight": "no"}))

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(Functional())
    with pytest.raises(BackendError, match=r"0\.weight#0: linear\.grad_weight as int8>float32 \(one: no\)"):
        apply_(model, {OpId("0.weight"): INT8}, backend="one")


def test_another_backend_is_a_visible_choice(install):
    one = NamedBackend("one")
    install(one)
    plan = assigned(_2=(INT8, "three", "linear.output=three/x"))
    model = net()
    apply_(model, plan, backend="one+aten")
    step(model)
    assert {config for _, config in one.ran} == {"a"}


def test_auto_takes_what_was_tuned_fastest_for_the_shapes_at_hand(install):
    one, two = NamedBackend("one"), NamedBackend("two")
    install(one, two)
    store = open_store(torch.device("cpu"))
    for asked in operator_requests(CallShapes("linear", (3, 100), (16, 100), (3, 16)), INT8, "cpu"):
        if asked.role in ("linear.output", "quantize"):
            store.add(TuningRecord(store.key("two", asked.request), "b", 10))
            store.add(TuningRecord(store.key("one", asked.request), "a", 20))
    model = net()
    apply_(model, assigned(_2=(INT8, "three", "")), backend="auto")
    step(model)
    assert sorted(two.ran) == [("linear.output", "b"), ("quantize", "b")]
    assert one.ran == []


def test_a_smaller_last_batch_runs_the_same_backends_first_candidate(install):
    class Picky(NamedBackend):
        def build(self, request, config):
            if config.text == "b" and request.op == "linear.output" and request.shapes[0][0] % 2:
                raise BackendError("configuration b takes an even number of rows")
            return super().build(request, config)

    one = Picky("one")
    install(one)
    model = nn.Sequential(nn.Linear(6, 4))
    apply_(model, assigned(_0=(INT8, "one", "linear.output=one/b")))
    model(torch.randn(8, 6))
    with pytest.warns(UserWarning, match="configuration b takes an even number of rows; it runs there with a instead"):
        model(torch.randn(3, 6))
    assert [config for op, config in one.ran if op == "linear.output"] == ["b", "a"]


def test_a_configuration_that_its_backend_does_not_have_stops_the_run_before_its_first_step(install):
    class Strict(NamedBackend):
        def build(self, request, config):
            if config.text not in self.configs:
                raise Unobtainable(f"there is no configuration {config.text!r}")
            return super().build(request, config)

    install(Strict("one"))
    model = net()
    with pytest.raises(BackendError, match=r"2#0: linear.output as int8>float32 \(one: there is no configuration 'tile=9'\)"):
        apply_(model, assigned(_2=(INT8, "one", "linear.output=one/tile=9")))
    assert not any(map(is_planned, model.modules()))
    request = operator_requests(CallShapes("linear", (4, 6), (8, 6), (4, 8)), INT8, "cpu")[-1].request
    with pytest.raises(Unobtainable):
        kernel_selection.build_kernel(request, KernelChoice.parse("one", f"{request.op}=one/tile=9"))


def test_a_product_that_kernels_were_not_chosen_for_is_not_asked_for(install):
    """The first operator of a model has no gradient of its input, and its backends need not offer one."""
    one = NamedBackend("one", refuses={"grad_input": "no gradients of inputs here"})
    install(one)
    chosen = "linear.output=one/a&linear.grad_weight=one/a&quantize=one/a&quantize.weight=one/a"
    model = nn.Sequential(nn.Linear(6, 4))
    apply_(model, assigned(_0=(INT8, "one", chosen)))
    model(torch.randn(8, 6)).square().mean().backward()
    assert ("linear.grad_weight", "a") in one.ran
    with pytest.raises(BackendError, match="no gradients of inputs here"):
        apply_(nn.Sequential(nn.Linear(6, 4)), assigned(_0=(INT8, "one", chosen + "&linear.grad_input=one/a")))


class Unobtainable(BackendError):
    for_any_sizes = True


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Kernels are built before the first step, as for a CUDA device."""
    prebuild = planned_kernels.prebuild
    monkeypatch.setattr(planned_kernels, "device_facts", lambda device: ("cpu", ""))
    monkeypatch.setattr(
        "qsync_torch.apply.planned_model.prebuild", lambda addressed, device, caller: prebuild(addressed, torch.device("cuda"))
    )


def refusing_to_build(error):
    class Refusing(CompilingNamedBackend):
        def build(self, request, config):
            if config.text == "b" and request.op == "linear.output":
                raise error
            return super().build(request, config)

    return Refusing("one")


def test_a_pinned_kernel_that_can_not_be_had_stops_the_run_before_its_first_step(install, as_on_a_gpu):
    install(refusing_to_build(Unobtainable("the kernel gemm was not compiled ahead")))
    model = net()
    with pytest.raises(BackendError) as caught:
        apply_(model, assigned(_2=(INT8, "one", "linear.output=one/b"), _4=(INT8, "one", "linear.output=one/b")))
    assert str(caught.value) == (
        "a kernel that the plan names cannot be had here: the kernel gemm was not compiled ahead (and 1 more like it); "
        "install what is missing, plan again on this machine, or say which kernels to take instead: "
        "apply_(..., backend='auto') takes the fastest that are installed, backend='aten' PyTorch's own"
    )
    assert not any(map(is_planned, model.modules()))


def test_a_pinned_kernel_that_does_not_fit_nominal_shapes_is_left_to_the_first_step(install, as_on_a_gpu):
    install(refusing_to_build(BackendError("7 parts are more than k has tiles")))
    model = net()
    apply_(model, assigned(_2=(INT8, "one", "linear.output=one/b")))
    assert is_planned(model[2])


def test_a_choice_that_can_not_be_read_is_refused(install):
    install(NamedBackend("one"))
    with pytest.raises(BackendError, match=r"not a choice of kernels: 'block=4'"):
        apply_(net(), assigned(_2=(INT8, "one", "block=4")))


@pytest.mark.parametrize("padding", ["same", "valid", 2])
def test_any_convolution_is_asked_for(install, padding):
    install(NamedBackend("one"))
    model = nn.Sequential(nn.Conv2d(4, 8, (3, 80), padding=padding, dilation=(2, 1), groups=2))
    apply_(model, {OpId("0"): INT8}, backend="one")
    assert is_planned(model[0])


def test_a_mapping_of_variants_runs_on_aten_on_a_cpu(install):
    one = NamedBackend("one")
    install(one)
    store = open_store(torch.device("cpu"))
    request = operator_requests(CallShapes("linear", (3, 100), (16, 100), (3, 16)), INT8, "cpu")[2].request
    store.add(attrs.evolve(TuningRecord(store.key("one", request), "a", 1)))
    model = net()
    apply_(model, {OpId("2"): INT8})
    step(model)
    assert one.ran == []
