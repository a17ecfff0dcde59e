"""A plan is for the settings that its group's profile was measured with."""

from __future__ import annotations

import warnings

import attrs
import pytest
import torch

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.settings import CHECKED_ON, SETTINGS
from qsync_torch import apply_
from qsync_torch.apply import planned_model
from qsync_torch.devices import software_versions

from .small_models import BFLOAT16, ConvNet, images, named
from .test_apply import plan_of


def _plan(device=None, **changed):
    """A plan whose profile was measured in a process like this one, but for what is changed."""
    plan = plan_of(named(conv1=BFLOAT16, conv2=BFLOAT16, fc=BFLOAT16))
    software = {**software_versions(torch.device("cpu")), "memory_format": "contiguous", **changed}
    groups = tuple(attrs.evolve(group, device=device or group.device) for group in plan.groups)
    return attrs.evolve(plan, software={"infer": software}, groups=groups)


def test_a_job_like_the_profile_is_taken_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_(ConvNet(), _plan())
        apply_(ConvNet(), plan_of(named(conv1=BFLOAT16, conv2=BFLOAT16, fc=BFLOAT16)))


def test_other_numbers_are_refused_with_the_way_out():
    with pytest.raises(PlanError) as caught:
        apply_(ConvNet(), _plan(float32_matmul="high"))
    text = str(caught.value)
    assert text.startswith(
        "float32_matmul (the precision of float32 products) was high when group 'infer' was profiled and is highest"
    )
    assert 'torch.set_float32_matmul_precision("high"), or profile the job as it runs' in text
    assert "apply_(..., allow_flags=['float32_matmul'])" in text
    torch.set_float32_matmul_precision("high")
    try:
        apply_(ConvNet(), _plan(float32_matmul="high"))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_switch_that_is_thrown_between_steps_is_refused_until_it_is_taken_back():
    model, allowing = ConvNet(), ConvNet()
    apply_(model, _plan())
    apply_(allowing, _plan(), allow_flags=["float32_matmul"])
    model(images())
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(PlanError, match=r"^float32_matmul .* was highest when group 'infer' .* and is medium in this job"):
            model(images())
        allowing(images())
    finally:
        torch.set_float32_matmul_precision("highest")
    model(images())


def test_what_the_caller_allows_is_not_refused():
    model = ConvNet()
    apply_(model, _plan(float32_matmul="high"), allow_flags=["float32_matmul"])
    with pytest.raises(PlanError, match=r"allow_flags names 'tf32'; the settings that are refused are device, share, autocast, "):
        apply_(ConvNet(), _plan(), allow_flags=["tf32"])


def test_an_active_autocast_is_compared_and_one_that_is_entered_later_is_not():
    under_autocast, without = _plan(autocast="bfloat16"), _plan()
    apply_(ConvNet(), under_autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apply_(ConvNet(), under_autocast)
        with pytest.raises(
            PlanError, match=r"^autocast .* was off .* and is bfloat16 in this job; .*write Job\(..., amp='bfloat16'\) and prof"
        ):
            apply_(ConvNet(), without)


def test_another_device_is_refused():
    device = DeviceType("Tesla T4", DeviceKind.CUDA)
    if torch.cuda.is_available():
        device = DeviceType("no such device", DeviceKind.CUDA)
    with pytest.raises(PlanError, match=f"device .* was {device.name} when group 'infer' was profiled and is"):
        apply_(ConvNet(), _plan(device))
    apply_(ConvNet(), _plan(device), allow_flags=["device"])


@pytest.mark.parametrize("name", ["torch", "threads", "deterministic_algorithms", "memory_format"])
def test_other_times_give_one_warning_that_names_the_setting(name):
    with pytest.warns(UserWarning, match="times may not hold") as caught:
        apply_(ConvNet(), _plan(**{name: "another"}))
    (warning,) = caught
    assert f"{name} ({SETTINGS[name].what}) was another when group 'infer' was profiled and is " in str(warning.message)
    assert warning.filename == __file__


def test_a_plan_from_an_estimated_profile_is_applied_with_a_warning():
    estimated = attrs.evolve(_plan(), estimated={"infer": "NVIDIA H200"})
    with pytest.warns(UserWarning, match="rests on estimated costs, not measured ones, of infer") as caught:
        apply_(ConvNet(), estimated)
    (warning,) = caught
    assert "of infer (from NVIDIA H200); profile these devices, plan again" in str(warning.message)
    assert warning.filename == __file__


PROFILED_ON = "GPU-a, 132 SMs"


@pytest.mark.parametrize("base", [Precision.FLOAT32, Precision.BFLOAT16], ids=["lowered", "as under autocast"])
@pytest.mark.parametrize(
    ("here", "known", "checked"),
    [
        (PROFILED_ON, {CHECKED_ON: PROFILED_ON}, False),
        ("GPU-b, 132 SMs", {CHECKED_ON: PROFILED_ON}, True),
        ("GPU-a, 66 SMs", {CHECKED_ON: PROFILED_ON}, True),
        (PROFILED_ON, {}, True),
    ],
    ids=["the same", "another GPU", "another share", "unknown"],
)
def test_kernels_are_checked_again_on_a_gpu_that_was_not_profiled(monkeypatch, base, here, known, checked):
    cuda, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(planned_model, "device_of", lambda model: cuda)
    monkeypatch.setattr(planned_model, "gpu_and_sms", lambda device: here)
    monkeypatch.setattr(planned_model, "Canary", lambda device: ("canary", device))
    monkeypatch.setattr(planned_model, "check_numbers", lambda addressed, canary, caller: asked.append(canary))
    for name in ("check_backends", "prebuild"):  # there is no such device
        monkeypatch.setattr(planned_model, name, lambda *_: None)
    monkeypatch.setattr(planned_model.StepKey, "on", lambda self, device: None)
    monkeypatch.setattr(planned_model.PlannedModel, "_prepare_operators", lambda self, device: None)
    plan = _plan()
    groups = tuple(attrs.evolve(group, base=base) for group in plan.groups)
    software = {"infer": {**plan.software["infer"], "autocast": "bfloat16" if base is Precision.BFLOAT16 else "off", **known}}
    apply_(ConvNet(), attrs.evolve(plan, base=base, groups=groups, software=software)).remove()
    assert asked == ([("canary", cuda)] if checked else [])
