import attrs
import pytest

from qsync_core.errors import PlanError
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch.distributed import ranks as group_module
from qsync_torch.distributed.ranks import which_group

from .small_models import INT8, named
from .test_apply import plan_of


def plan(**devices):
    whole = plan_of(named(fc=INT8))
    (template,) = whole.groups
    groups = tuple(attrs.evolve(template, group=name, device=device) for name, device in devices.items())
    return attrs.evolve(whole, groups=groups, rank0_group=groups[0].group)


T4, V100 = DeviceType("T4", DeviceKind.CUDA), DeviceType("V100", DeviceKind.CUDA)


def test_the_environment_decides():
    assert which_group(plan(train=V100, infer=T4), {"QSYNC_GROUP": "infer"}) == "infer"


def test_an_unknown_name_in_the_environment_is_an_error():
    with pytest.raises(PlanError, match="QSYNC_GROUP is 'inferr', but the plan's groups are train, infer; set it to one of them"):
        which_group(plan(train=V100, infer=T4), {"QSYNC_GROUP": "inferr"})


@pytest.mark.parametrize("found, group", [("Tesla T4", "infer"), ("Tesla V100-SXM2-16GB", "train")])
def test_otherwise_the_device_does(monkeypatch, found, group):
    monkeypatch.setattr(group_module, "device_name", lambda: (found, DeviceKind.CUDA))
    assert which_group(plan(train=V100, infer=T4), {}) == group


def test_no_or_two_matching_groups_are_errors(monkeypatch):
    monkeypatch.setattr(group_module, "device_name", lambda: ("NVIDIA L4", DeviceKind.CUDA))
    with pytest.raises(
        PlanError, match=r"no group matches this device \(NVIDIA L4, cuda\); the plan's groups are train, infer: set QSYNC_"
    ):
        which_group(plan(train=V100, infer=T4), {})
    monkeypatch.setattr(group_module, "device_name", lambda: ("Tesla T4", DeviceKind.CUDA))
    half = attrs.evolve(T4, share=0.5)
    with pytest.raises(PlanError, match="groups infer, night all match this device"):
        which_group(plan(train=V100, infer=T4, night=half), {})
    assert which_group(plan(train=V100, infer=T4, night=half), {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}) == "night"
