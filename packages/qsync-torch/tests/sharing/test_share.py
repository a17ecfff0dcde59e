"""``use_share`` puts a process under its group's share, or says why it cannot; the GPUs are made up."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from types import SimpleNamespace

import attrs
import pytest
import torch
from click.testing import CliRunner

from qsync_core.artifacts.files import save
from qsync_core.cluster_file import parse_cluster
from qsync_core.errors import PlanError
from qsync_core.ir.plan import OUTSIDE, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch import apply_, green_share, use_share
from qsync_torch.cli.profile import profile
from qsync_torch.distributed.ranks import which_group
from qsync_torch.sharing import share as module
from qsync_torch.sharing.mps import Daemon
from qsync_torch.sharing.share import Share, is_gpu, refuse_deferred, share_in_force

VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CLUSTER = """
[[group]]
name = "train"
device = "H200"
count = 1
role = "train"

[[group]]
name = "infer"
device = "H200"
count = 1
role = "infer"
share = {share}
ladder = ["bfloat16", "float32"]
memory = "{memory}"
"""


def plan_of(share: float = 0.5, memory_bytes: int = 0, name: str = "NVIDIA H200") -> PrecisionPlan:
    kind = DeviceKind.CPU if name == "cpu" else DeviceKind.CUDA
    train = GroupPlan("train", Role.TRAIN, 1, DeviceType(name, kind), Precision.FLOAT32, {})
    infer = attrs.evolve(
        train, group="infer", role=Role.INFER, device=DeviceType(name, kind, share), memory_budget_bytes=memory_bytes
    )
    return PrecisionPlan("m", "", (), {}, "by hand", "", 1, 1, 0.0, None, (train, infer), "train")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Two H200s and a T4, with an MPS daemon; CUDA has not started.  Holds the cap of each GPU, as a fraction."""
    caps: dict[int, float] = {}
    gpus = [("NVIDIA H200", 140), ("NVIDIA H200", 140), ("Tesla T4", 15)]
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("QSYNC_GROUP", "")
    monkeypatch.setattr(module, "_deferred", [])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(module, "find_daemon", Daemon)
    monkeypatch.setattr(module, "cuda_has_started", lambda: False)
    monkeypatch.setattr(module, "gpu_names", lambda: ("NVIDIA H200",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][0])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=gpus[index][1] << 30, multi_processor_count=132),
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: caps.update({index: fraction}))
    return caps


def test_a_share_is_asked_of_mps_and_memory_is_capped_on_gpus_of_the_groups_type(machine):
    assert use_share(plan_of(0.5, 70 << 30), "infer") == Share("infer", "NVIDIA H200", 0.5, 70 << 30)
    assert os.environ[VARIABLE] == "50"
    assert which_group(plan_of()) == "infer"
    assert machine == {0: 0.5, 1: 0.5}
    assert share_in_force() == (0.5, "")


def test_the_cap_leaves_out_what_a_plan_says_is_outside_the_allocator(machine):
    plan = attrs.evolve(plan_of(0.5, 71 << 30), memory={"infer": {OUTSIDE: 1 << 30, "parameters": 5}})
    assert use_share(plan, "infer") == Share("infer", "NVIDIA H200", 0.5, 71 << 30, 1 << 30)
    assert machine == {0: 0.5, 1: 0.5}


def test_a_group_with_the_whole_of_its_device_needs_nothing(machine, monkeypatch):
    monkeypatch.setattr(module, "find_daemon", lambda: pytest.fail("not asked"))
    use_share(plan_of(), "train")
    assert (os.environ[VARIABLE], machine, share_in_force()) == ("", {}, (1.0, ""))


def test_on_a_cpu_there_is_nothing_to_share(machine):
    assert not use_share(plan_of(memory_bytes=1 << 30, name="cpu"), "infer").on_gpu
    assert (os.environ[VARIABLE], machine) == ("", {})


def test_a_plan_file_and_a_cluster_file_say_the_same(tmp_path, machine):
    text = CLUSTER.format(share=0.25, memory="35 GiB")
    (tmp_path / "cluster.toml").write_text(text)
    save(plan_of(0.25, 35 << 30), tmp_path / "plan.qsync")
    wanted = Share("infer", "H200", 0.25, 35 << 30)
    assert use_share(parse_cluster(text), "infer") == use_share(tmp_path / "cluster.toml", "infer") == wanted
    assert use_share(str(tmp_path / "plan.qsync"), "infer") == attrs.evolve(wanted, device="NVIDIA H200")
    assert machine == {0: 0.25, 1: 0.25}


def test_the_group_is_found_as_apply_finds_it(monkeypatch):
    with pytest.raises(PlanError, match=r"groups train, infer all match this device \(NVIDIA H200, cuda\); .* set QSYNC_GROUP"):
        use_share(plan_of())
    for source in (plan_of(), parse_cluster(CLUSTER.format(share=0.5, memory="1 GiB"))):
        with pytest.raises(PlanError, match="there is no group 'other'; the groups are train, infer"):
            use_share(source, "other")
    monkeypatch.setenv(VARIABLE, "50")
    assert use_share(plan_of()).group == "infer"
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("QSYNC_GROUP", "infer")
    assert use_share(plan_of()).fraction == 0.5


@pytest.mark.parametrize("group, fraction, remedy", [("infer", "0.5", "set it to 50"), ("train", "1", "set it to 100")])
def test_another_percentage_in_the_environment_is_refused(monkeypatch, group, fraction, remedy):
    monkeypatch.setenv(VARIABLE, "30")
    with pytest.raises(
        PlanError, match=rf"group '{group}' has share {fraction} of its GPU, but {VARIABLE} is 30: unset it, or {remedy}"
    ):
        use_share(plan_of(), group)


def test_without_a_daemon_it_is_refused_and_does_not_count_as_a_share(monkeypatch):
    monkeypatch.setattr(module, "find_daemon", lambda: Daemon("no MPS daemon answers at /p"))
    with pytest.raises(
        PlanError, match=r"share 0.5 of its GPU, but no MPS daemon answers at /p: start it with 'nvidia-cuda-mps-control -d'"
    ):
        use_share(plan_of(), "infer")
    monkeypatch.setenv(VARIABLE, "50")
    assert share_in_force() == (1.0, "no MPS daemon answers at /p")


def test_after_cuda_has_started_it_is_too_late_unless_the_environment_said_it_before(monkeypatch):
    monkeypatch.setattr(module, "cuda_has_started", lambda: True)
    with pytest.raises(PlanError, match=rf"CUDA has started before .* or start the process with {VARIABLE}=50"):
        use_share(plan_of(), "infer")
    monkeypatch.setenv(VARIABLE, "50")
    assert use_share(plan_of(), "infer").fraction == 0.5


@pytest.mark.parametrize(
    "device, gpus, found", [("cpu", ("T4",), False), ("auto", (), False), ("auto", ("T4",), True), ("cuda:1", (), True)]
)
def test_whether_a_command_will_run_on_a_gpu(monkeypatch, device, gpus, found):
    monkeypatch.setattr(module, "gpu_names", lambda: gpus)
    assert is_gpu(device) is found


def test_qsync_profile_starts_under_its_share(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "take_sms", lambda fraction, who: asked.append(fraction))
    for options in (["--share", "0.5"], []):
        done = CliRunner().invoke(profile, ["resnet18", "-o", "x.qsync", "--device", "cuda:99", *options])
        assert "cuda:99 was asked for" in str(done.exception)
    monkeypatch.delenv(VARIABLE)
    CliRunner().invoke(profile, ["resnet18", "-o", "x.qsync", "--device", "cuda:99"])
    assert asked == [0.5, 1.0]  # not where nothing asks for one


def test_under_torchrun_apply_refuses_it_when_the_ranks_know_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(module, "cuda_has_started", lambda: True)
    with pytest.warns(UserWarning, match="use_share: group 'infer' has share 0.5 of its GPU, .* CUDA has started before"):
        use_share(plan_of(), "infer")
    with pytest.raises(PlanError, match=r"^group 'infer' has share 0.5 of its GPU, .* CUDA has started before"):
        apply_(torch.nn.Linear(2, 2), plan_of())
    monkeypatch.setenv(VARIABLE, "50")
    use_share(plan_of(), "infer")
    refuse_deferred()


def test_a_gpu_that_no_group_has_waits_for_apply_too(monkeypatch, tmp_path):
    """Or one rank would end before the others know of it, and they would wait for it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = plan_of(name="Tesla V100")
    for context in (use_share, lambda plan: green_share(plan).__enter__()):
        with pytest.warns(UserWarning, match=r"^(use|green)_share: no group matches this device \(NVIDIA H200, cuda\)"):
            assert not context(other).on_gpu
        with pytest.raises(PlanError, match=r"^no group matches this device \(NVIDIA H200, cuda\); the plan's groups are"):
            refuse_deferred()
    with pytest.warns(UserWarning, match="use_share: .*none.qsync"):
        use_share(tmp_path / "none.qsync")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(PlanError, match="no group matches this device"):
        use_share(other)


def test_memory_that_the_device_does_not_have_is_refused(machine):
    with pytest.raises(
        PlanError, match="group 'infer' has memory 150 GiB, but this device has 140 GiB: correct the group's memory"
    ):
        use_share(plan_of(1.0, 150 << 30), "infer")
    assert machine == {}


def test_memory_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match=r"group 'infer' has GPUs \(NVIDIA H200\), but torch sees none here"):
        use_share(plan_of(1.0, 1 << 30), "infer")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has green contexts")
def test_green_contexts_that_torch_does_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    refusal = r"group 'infer' is to run in a green context, and this PyTorch .* makes none: .*Green Context.*; use MPS"
    with pytest.raises(PlanError, match=refusal), green_share(plan_of(), "infer"):
        pytest.fail("entered")
    with green_share(plan_of(), "train") as whole:
        assert whole.fraction == 1
        assert share_in_force() == (1.0, "")


def test_a_green_context_lives_as_long_as_its_stream_may_be_used(monkeypatch):
    """PyTorch destroys a green context, and with it what its stream runs in, when nothing refers to its object any more."""
    alive = weakref.WeakSet()

    class Context:
        @classmethod
        def create(cls, num_sms, device_id):
            assert (num_sms, device_id) == (66, 0)
            alive.add(found := cls())
            return found

        def Stream(self):
            return SimpleNamespace(wait_stream=lambda other: None)

    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", SimpleNamespace(GreenContext=Context))
    monkeypatch.setattr(module, "_green_contexts", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with green_share(plan_of(), "infer"):
        gc.collect()
        assert len(alive) == 1
        assert share_in_force() == (0.5, "")
    gc.collect()
    assert len(alive) == 1  # tensors of its stream may be there yet
