"""Kernels that compute wrong numbers: found before anything rests on them, and left out by name."""

import functools
import os
import re
import sys
import time

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import BackendError, QSyncError
from qsync_core.geometry import Geometry
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Granularity, Precision, Storage
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import ATEN, KernelChoice
from qsync_core.kernels.requests import CallShapes, operator_requests
from qsync_core.settings import CHECKED_ON
from qsync_torch.apply.kernel_check import check_numbers
from qsync_torch.apply.plan_fit import Planned, locate
from qsync_torch.aten import float_products
from qsync_torch.distributed.ranks import SHARE_VARIABLE
from qsync_torch.doctor.products import CALLS, formats_of, share_lines, whole_lines
from qsync_torch.job import Batch, Job
from qsync_torch.kernels import selection
from qsync_torch.kernels.canary import Canary, smaller
from qsync_torch.kernels.selection import reasons_against
from qsync_torch.prepare.flow import Request, prepare
from qsync_torch.profiling import profile as profiling
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.items import distinct_items, right_kernels
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.sharing import right_shares
from qsync_torch.sharing.right_shares import nearest_right, probing, under_shares, wrong_base_error
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.chooser import KernelChooser

from .installed_backends import NamedBackend

CPU = torch.device("cpu")
QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
EFFORTS = Efforts(QUICK, QUICK, QUICK)
INT8, BFLOAT16, FLOAT32 = (Variant.of(p) for p in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32))
CALL = CallShapes("linear", (48, 32), (64, 32), (48, 64))


def _one_nan(out):
    out.view(-1)[out.numel() // 3] = float("nan")


def _last_rows(out):
    out[-2:] = 1.0


def _wide_only(out):
    if out.shape[-1] >= 64:
        out.mul_(1e18)


class WrongBackend(NamedBackend):
    """Right, but for one operator, whose result is spoilt after it was computed."""

    def __init__(self, name, spoil, op="linear.output"):
        super().__init__(name)
        self._spoil, self._op = spoil, op

    def build(self, request, config):
        kernel = super().build(request, config)
        if request.op != self._op:
            return kernel

        def spoilt(*arguments):
            kernel(*arguments)
            self._spoil(arguments[-1] if not self._op.startswith("quantize") else arguments[1])

        return spoilt


@pytest.mark.parametrize("spoil", [_one_nan, _last_rows, _wide_only])
@pytest.mark.parametrize("op", ["linear.output", "linear.grad_input", "linear.grad_weight"])
def test_a_wrong_kernel_of_a_backend_is_named(install, spoil, op):
    install(WrongBackend("bad", spoil, op), NamedBackend("good"))
    call = attrs.evolve(CALL, x=(64, 64), w=(64, 64), y=(64, 64))
    canary = Canary(CPU)
    assert canary.of_operator(call, INT8, KernelChoice(("good",))) == []
    (wrong,) = canary.of_operator(call, INT8, KernelChoice(("bad",)))
    assert (wrong.role, wrong.backend) == (op, "bad")
    assert str(wrong).startswith(f"{op} of bad in int8 on ")
    assert canary.of_operator(call, INT8, KernelChoice(("bad",))) == [wrong]
    assert canary.wrong == [wrong]


def _replaced(out):
    out.data = out.data.clone()


@pytest.mark.parametrize("op", ["quantize", "linear.output", "dequantize"])
def test_a_kernel_that_replaces_its_output_is_named(install, monkeypatch, op):
    install(WrongBackend("bad", _replaced, op))
    monkeypatch.setattr(selection, "default_backend", lambda device: "bad")
    variant = attrs.evolve(BFLOAT16, storage=Storage.NF4) if op == "dequantize" else INT8
    wrong = Canary(CPU).of_operator(CALL, variant, KernelChoice(("bad",)))
    assert {one.role.removesuffix(".weight") for one in wrong} == {op}
    assert {one.problem for one in wrong} == {"the kernel replaced its output instead of writing into it"}


def test_garbage_at_some_shapes_is_wrong_at_these_alone(install):
    install(WrongBackend("bad", _wide_only))
    canary, choice = Canary(CPU), KernelChoice(("bad",))
    narrow = attrs.evolve(CALL, w=(32, 32), y=(48, 32))
    assert [len(canary.of_operator(call, INT8, choice)) for call in (narrow, CALL)] == [0, 1]


@pytest.mark.parametrize("storage", [storage for storage in Storage if storage.is_quantized])
@pytest.mark.parametrize("spoil", [_one_nan, _last_rows, lambda out: None])
def test_a_stored_weight_that_is_read_wrong_is_named(install, monkeypatch, storage, spoil):
    install(WrongBackend("bad", spoil, "dequantize"))
    monkeypatch.setattr(selection, "default_backend", lambda device: "bad")
    for call in (CALL, CallShapes("conv2d", (2, 8, 6, 6), (16, 8, 3, 3), (2, 16, 6, 6), Geometry((1, 1), (1, 1), (1, 1)))):
        wrong = Canary(CPU).of_operator(call, attrs.evolve(BFLOAT16, storage=storage))
        if spoil not in (_one_nan, _last_rows):
            assert wrong == []
            continue
        assert [(one.role, one.backend) for one in wrong] == [("dequantize", "bad")]
        assert re.fullmatch(r"\d+ of its [\d,]+ elements are not what is stored", wrong[0].problem)


def test_a_wrong_quantization_is_named(install):
    install(WrongBackend("bad", lambda q: q.view(-1)[:1].add_(64), "quantize"))
    wrong = Canary(CPU).of_operator(CALL, INT8, KernelChoice(("bad",)))
    assert {one.role for one in wrong} == {"quantize", "quantize.weight"}
    assert all("steps off" in one.problem for one in wrong)


class SpoiltQuantize(NamedBackend):
    """``spoil`` runs the kernel of quantize, with all that it was called with."""

    def __init__(self, name, spoil):
        super().__init__(name)
        self._spoil = spoil

    def build(self, request, config):
        kernel = super().build(request, config)
        return functools.partial(self._spoil, kernel) if request.op == "quantize" else kernel


def _of_an_earlier_call():
    kept = {}

    def stale(kernel, x, q, scale, *others):
        key = (x.data_ptr(), x.shape, x._version)
        if key not in kept:
            kernel(x, q, scale, *others)
            kept[key] = x, q.clone(), scale.clone()
        q.copy_(kept[key][1])
        scale.copy_(kept[key][2])

    return stale


def _last_scale(kernel, x, q, scale, *others):
    kernel(x, q, scale, *others)
    scale[-1] *= 1.01


BY_ROW = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)


@pytest.mark.parametrize("variant", [INT8, BY_ROW, attrs.evolve(BY_ROW, symmetric=False)], ids=["", "by row", "zero points"])
def test_copies_of_an_earlier_call_are_named(install, variant):
    install(SpoiltQuantize("bad", _of_an_earlier_call()), NamedBackend("good"))
    call = attrs.evolve(CALL, x=(43, 32), y=(43, 64))
    assert Canary(CPU).of_operator(call, variant, KernelChoice(("good",))) == []
    wrong = Canary(CPU).of_operator(call, variant, KernelChoice(("bad",)))
    assert {one.role for one in wrong} == {"quantize", "quantize.weight"}
    assert all(one.problem.startswith("of other numbers in the same memory, ") for one in wrong)


def _without_factors_of_rows(kernel, *operands):
    kernel(*operands[:8])


def _with_factors_in_both_copies(kernel, x, q, scale, *others):
    kernel(x, q, scale, *others)
    if len(others) > 5:
        kernel(x * others[5][:, None], q, scale, *others[:5])


@pytest.mark.parametrize("spoil", [_without_factors_of_rows, _with_factors_in_both_copies])
def test_a_transposed_copy_of_other_numbers_than_those_times_their_rows_factors_is_named(install, spoil):
    variant = attrs.evolve(BY_ROW, grad_input=Precision.INT8, grad_weight=Precision.INT8)
    install(SpoiltQuantize("bad", spoil), NamedBackend("good"))
    assert Canary(CPU).of_operator(CALL, variant, KernelChoice(("good",))) == []
    wrong = {one.role: one.problem for one in Canary(CPU).of_operator(CALL, variant, KernelChoice(("bad",)))}
    assert wrong.keys() >= {"quantize.gradient"}
    other = "of its transposed copy, one of its scales" if spoil is _without_factors_of_rows else "one of its scales"
    assert all(problem.startswith(other) for problem in wrong.values())


def test_a_scale_of_one_row_that_is_off_by_a_hundredth_is_named(install):
    install(SpoiltQuantize("bad", _last_scale))
    wrong = Canary(CPU).of_operator(attrs.evolve(CALL, x=(43, 32), y=(43, 64)), BY_ROW, KernelChoice(("bad",)))
    assert {one.role for one in wrong} == {"quantize", "quantize.weight"}
    assert all(one.problem == "one of its scales is 1.01 times what its numbers need" for one in wrong)


def test_calls_on_a_cpu_become_small_but_keep_their_remainders():
    assert smaller(CallShapes("linear", (7, 11, 999), (4099, 999), (7, 11, 4099))).w == (64 + 3, 64 + 7)


def _job():
    torch.manual_seed(0)
    return Job(
        "net",
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)),
        lambda step, size: Batch((torch.randn(size, 32),), target=torch.arange(size) % 4),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def _profile(job, notes, backend, ladder=(INT8, BFLOAT16, FLOAT32)):
    return profile(
        job, trace(job), ProfileRequest(ladder=ladder, backend=backend, with_collectives=False, efforts=EFFORTS), note=notes.append
    )


def test_a_profile_takes_the_next_backend_in_place_of_a_wrong_one(install):
    install(WrongBackend("bad", _wide_only), NamedBackend("good"))
    notes, job = [], _job()
    found = _profile(job, notes, "bad+good+aten")
    first, second = (found.cost(OpId(name), INT8) for name in ("0", "2"))
    assert ("linear.output=good/" in first.config, "linear.output=bad/" in second.config) == (True, True)
    (wrong,) = found.check.wrong
    assert (wrong.operators, wrong.variant, wrong.kernel) == ((OpId("0"),), INT8, "linear.output of bad")
    assert any("linear.output of bad in int8 is left out for operator 0#0" in note for note in notes)
    assert {step.variant for step in found.steps} == {INT8, BFLOAT16, FLOAT32}


def test_where_no_backend_is_right_the_operator_is_not_measured_so(install):
    install(WrongBackend("bad", _wide_only), WrongBackend("worse", _one_nan))
    job = _job()
    chooser = KernelChooser(CPU, "bad+worse")
    dag = trace(job)
    found = right_kernels(distinct_items(dag, (INT8,)), dag, chooser, Canary(CPU))
    left = {str(op_id): item.variant for item in found.choices if item.operator.is_adjustable for op_id in item.holders}
    assert left == {"2#0": INT8}  # which is narrow
    assert [(str(*entry.operators), entry.kernel) for entry in found.wrong] == [
        ("0#0", "linear.output of bad"),
        ("0#0", "linear.output of worse"),
    ]
    assert found.of_base == ()


@pytest.fixture
def wrong_bfloat16(monkeypatch):
    """PyTorch's own product in bfloat16 has one wrong element where it is 64 wide, as its library's had under a share."""
    right = float_products.product

    def product(x, weight, bias, geometry):
        y = right(x, weight, bias, geometry)
        if x.dtype is torch.bfloat16 and y.shape[-1] == 64:
            y = y + torch.zeros_like(y).index_fill_(0, torch.tensor([len(y) - 1]), 1e18)
        return y

    monkeypatch.setattr(float_products, "product", product)


def test_a_wrong_rung_is_left_out_for_its_operators_alone(wrong_bfloat16):
    notes, job = [], _job()
    found = _profile(job, notes, "aten")
    assert set(found.cost_index[OpId("0")]) == {INT8, FLOAT32}
    assert set(found.cost_index[OpId("2")]) == {INT8, BFLOAT16, FLOAT32}
    # No whole step has every operator in that format.
    assert {step.variant for step in found.steps} == {INT8, FLOAT32}
    assert [(entry.kernel, entry.variant) for entry in found.check.wrong] == [("linear.output of aten", BFLOAT16)]


def test_a_wrong_base_is_refused(wrong_bfloat16):
    job = attrs.evolve(_job(), amp=Precision.BFLOAT16)
    with pytest.raises(QSyncError) as caught:
        _profile(job, [], "aten")
    said = str(caught.value)
    assert "this cpu computes wrong numbers in bfloat16" in said
    assert "linear.output of aten in bfloat16 on [4, 32] and [64, 32]: its errors are " in said


def _probe(right, unknown=(), asked=None):
    """A probe under which shares of a list are right."""

    def probe(percents):
        if asked is not None:
            asked.append(percents)
        return {percent: "" if percent in right else None if percent in unknown else "wrong" for percent in percents}

    return probe


def test_a_refused_share_comes_with_the_nearest_that_are_right(wrong_bfloat16):
    wrong = Canary(CPU).of_operator(CALL, BFLOAT16)
    asked = []
    probe = _probe((10, 25, 30, 50, 55, 100), unknown=(45,), asked=asked)
    said = str(wrong_base_error(wrong, [CALL], Precision.BFLOAT16, 0.4, "NVIDIA H200", probe))
    assert said.startswith("a share of 0.4 of this NVIDIA H200 computes wrong numbers in bfloat16")
    assert "linear.output of aten in bfloat16 on [48, 32] and [64, 32]" in said
    assert "the nearest shares that are right here: 0.3 and 0.5; set the group's share" in said
    assert asked == [[35, 30, 25, 45, 50, 55]]  # at once
    none = str(wrong_base_error(wrong, [CALL], Precision.BFLOAT16, 0.4, "NVIDIA H200", _probe(())))
    assert "no share near it is right: give the group the whole GPU" in none


def test_shares_between_the_steps_are_tried_on_both_sides():
    every = range(5, 101, 5)
    assert nearest_right(42, _probe(every)) == [40, 45]
    assert nearest_right(98, _probe(every)) == [95, 100]
    assert nearest_right(5, _probe(every)) == [10]


def test_further_shares_are_tried_on_the_side_that_has_none_yet():
    asked = []
    assert nearest_right(75, _probe((10, 25, 50, 90, 100), asked=asked)) == [50, 90]
    assert asked == [[70, 65, 60, 80, 85, 90], [55, 50, 45]]


def test_each_share_is_tried_in_a_process_of_its_own():
    def run():
        if os.environ[SHARE_VARIABLE] == "30":
            os._exit(1)
        return [f"wrong at {os.environ[SHARE_VARIABLE]}%"] if os.environ[SHARE_VARIABLE] != "20" else []

    before = dict(os.environ)
    found = under_shares(range(10, 90, 10), run)  # more than are tried at once
    assert found == {10: "wrong at 10%", 20: "", 30: None, **{share: f"wrong at {share}%" for share in range(40, 90, 10)}}
    assert dict(os.environ) == before


def test_a_process_answers_as_long_as_it_is_asked(monkeypatch):
    calls = [attrs.evolve(CALL, x=(8, 8), w=(8, 8), y=(8, 8))]
    with probing(calls, [Precision.FLOAT32], CPU) as probe:
        assert [probe([50, 25]), probe([75])] == [{50: "", 25: ""}, {75: ""}]
    monkeypatch.setattr(sys, "executable", "/bin/false")  # it ends at once
    with probing(calls, [Precision.FLOAT32], CPU) as probe:
        assert [probe([50]), probe([75])] == [{50: None}, {75: None}]


HANGING = """#!/bin/sh
read calls
read shares
sleep 30 &
sleep 30
"""


def test_forks_that_hang_are_ended_with_the_process_that_they_are_of(monkeypatch, tmp_path):
    """They hold its end of the pipe."""
    path = tmp_path / "hanging"
    path.write_text(HANGING)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(right_shares, "_START_S", 0.1)
    monkeypatch.setattr(right_shares, "_LIMIT_S", 0.2)
    begin = time.monotonic()
    with probing([], [Precision.FLOAT32], CPU) as probe:
        assert probe([50]) == {50: None}
    assert time.monotonic() - begin < 15


def test_a_wrong_base_is_refused_before_anything_is_measured(wrong_bfloat16, monkeypatch, tmp_path):
    job = attrs.evolve(_job(), amp=Precision.BFLOAT16)

    def measure(*arguments, **options):
        raise AssertionError("it is measured")

    for name in ("profile", "tune_job", "observe", "StepRunner"):
        monkeypatch.setattr(f"qsync_torch.prepare.measuring.{name}", measure)
    monkeypatch.setattr("qsync_torch.prepare.flow.measure_communication", measure)
    monkeypatch.setattr("qsync_torch.prepare.flow.load_job", lambda name, batch: job)
    with pytest.raises(QSyncError, match=r"this .* computes wrong numbers in bfloat16, the precision that the job has"):
        prepare(Request("job.py:job", tmp_path / "run", CPU, quiet=True))


def test_a_check_that_does_not_fit_is_left_to_the_measurements(monkeypatch, tmp_path):
    def is_too_large(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def measure(*arguments, **options):
        raise QSyncError("it is measured")

    monkeypatch.setattr("qsync_torch.prepare.measuring.check_base", is_too_large)
    monkeypatch.setattr("qsync_torch.prepare.measuring.profile", measure)
    monkeypatch.setattr("qsync_torch.prepare.flow.load_job", lambda name, batch: _job())
    with pytest.raises(QSyncError, match="it is measured"):
        prepare(Request("job.py:job", tmp_path / "run", CPU, quiet=True))


def test_a_plan_is_refused_where_its_kernels_are_wrong(install):
    install(WrongBackend("bad", _last_rows), NamedBackend("good"))
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))

    def check(backend):
        planned = Planned({OpId("1"): Assignment(INT8, backend, "", "")}, None, None, Precision.FLOAT32, ())
        check_numbers(locate(model, planned.on(CPU), None), Canary(CPU))

    check("good")
    with pytest.raises(BackendError) as caught:
        check("bad")
    said = str(caught.value)
    assert "1 kernels of the plan compute wrong numbers on this device: 1#0: linear.output of bad in int8" in said
    assert "profile" in said


def test_a_profile_has_the_gpu_on_which_kernels_were_checked(monkeypatch):
    monkeypatch.setattr(profiling, "gpu_and_sms", lambda device: "GPU-a, 132 SMs")
    assert _profile(_job(), [], "aten", ladder=(FLOAT32,)).software[CHECKED_ON] == "GPU-a, 132 SMs"
    monkeypatch.undo()
    assert CHECKED_ON not in _profile(_job(), [], "aten", ladder=(FLOAT32,)).software  # of a CPU there is nothing to say


def test_the_doctor_names_shares_that_are_right_and_wrong():
    found = {10: "", 20: "", 40: "linear.output of aten in bfloat16 on …: garbage", 50: "", 60: None}
    wrong, unknown = share_lines("cuda:0", found)
    assert wrong.finding.startswith("products are wrong at 40%, right at 10, 20, 50%; at 40%: linear.output of aten")
    assert (str(wrong.status), unknown.finding) == ("warning", "no process could be tried at 60%")
    assert [line.finding for line in share_lines("cuda:0", {10: "", 20: ""})] == ["products are right at 10, 20%"]
    (whole,) = whole_lines("cuda:0", ["one", "two"])
    assert (str(whole.status), whole.finding) == ("error", "wrong: one (and 1 more)")


@pytest.mark.parametrize("capability", ["7.0", "7.5", "8.0", "9.0"])
def test_the_doctor_tries_no_format_that_backends_refuse(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(map(int, capability.split("."))))
    tried = [Variant.of(precision) for precision in formats_of(torch.device("cuda", 0))]
    requests = [asked for call in CALLS for variant in tried for asked in operator_requests(call, variant, "cuda", capability)]
    assert {reason for asked in requests for reason in reasons_against(asked.request, ATEN)} == set()
    assert FLOAT32 in tried
