"""Hybrid jobs over NCCL on two GPUs, the second one shared by MPS: what runs, and what every rank refuses before the first step.

Where ``nvidia-smi -L`` shows fewer than two GPUs, or there is no MPS, each test is skipped by name.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
import torch

from qsync_core.artifacts.files import save
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch.sharing.mps import CONTROL, find_daemon, gpu_names

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("hybrid_rank.py")
OPERATORS = (OpId("0"), OpId("2"))
NOWHERE = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


@pytest.fixture(autouse=True)
def two_gpus(request):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{request.node.name} needs two CUDA devices")


@pytest.fixture(scope="module")
def mps(tmp_path_factory):
    """An MPS daemon of our own; variables with which a process finds it."""
    if torch.cuda.device_count() < 2 or shutil.which(CONTROL) is None:
        pytest.skip(f"needs two CUDA devices and {CONTROL} in PATH")
    folder = tmp_path_factory.mktemp("mps")
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for place in places.values():
        Path(place).mkdir()
    subprocess.run([CONTROL, "-d"], env=os.environ | places, check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_MPS_PIPE_DIRECTORY", places["CUDA_MPS_PIPE_DIRECTORY"])
        until = time.monotonic() + 30
        while find_daemon().problem and time.monotonic() < until:
            time.sleep(0.5)
        assert find_daemon().problem == ""
    yield places
    subprocess.run([CONTROL], input="quit\n", text=True, env=os.environ | places, timeout=120, check=False)


def plan_of(train: float = 1.0, infer: float = 0.5, memory_bytes: int = 0) -> PrecisionPlan:
    """Uniform bfloat16 on the inference group, with these shares of GPUs of one type."""

    def group(name: str, role: Role, share: float, precision: Precision, memory_bytes: int) -> GroupPlan:
        device = DeviceType(gpu_names()[0], DeviceKind.CUDA, share)
        entries = dict.fromkeys(OPERATORS, Assignment(Variant.of(precision), "aten", "", "by hand"))
        return GroupPlan(name, role, 1, device, Precision.FLOAT32, entries, memory_bytes)

    groups = (
        group("train", Role.TRAIN, train, Precision.FLOAT32, 0),
        group("infer", Role.INFER, infer, Precision.BFLOAT16, memory_bytes),
    )
    return PrecisionPlan(
        "m", "", OPERATORS, {}, "by hand", "", 1, 1, 0.0, None, groups, "train", output_formats=OutputFormats(decides=False)
    )


def start(plan: PrecisionPlan, case: str, folder: Path, *variables: dict[str, str]) -> list[tuple[int, dict, str]]:
    """Status, what it saw, and the sentence of each rank; group ``train`` is rank 0."""
    save(plan, folder / "plan.qsync")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "QSYNC_RANK_TIMEOUT_S": "60"}
    processes = []
    for rank, added in enumerate(variables):
        environment = os.environ | job | {"RANK": str(rank), "QSYNC_GROUP": ("train", "infer")[rank]} | added
        command = [sys.executable, str(SCRIPT), str(folder / "plan.qsync"), case]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    ended = []
    for process, (out, error) in zip(processes, outputs, strict=True):
        sentence = error.rpartition("error: ")[2].strip() if process.returncode else error
        ended.append((process.returncode, json.loads(out) if out.strip() else {}, sentence))
    print(f"{case}: {ended}")  # shown with -s: what a process sees of its share
    return ended


def check_refused(ended: list[tuple[int, dict, str]], *sentences: str, by: int | None = None) -> None:
    """Both ranks ended with these words; in one's own where only one refuses."""
    for rank, (status, _, error) in enumerate(ended):
        assert status == 1, ended
        assert all(sentence in error for sentence in sentences), ended
        assert error.startswith(f"rank {by} refuses: ") is (by is not None and by != rank), ended


def test_a_uniform_plan_runs_under_the_shares(mps, tmp_path):
    (first, whole, error), (second, half, other) = start(plan_of(), "", tmp_path, mps, mps)
    assert (first, second) == (0, 0), error + other
    assert whole["sum"] == half["sum"]
    assert 0.4 <= half["sms"] / whole["sms"] <= 0.6


def test_doctor_speaks_of_the_daemon(mps):
    command = [sys.executable, "-m", "qsync_core.cli", "doctor", "--json"]
    done = subprocess.run(command, env=os.environ | mps, capture_output=True, text=True, timeout=120, check=False)
    lines = {line["topic"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["mps"]["status"] == "ok", lines
    assert mps["CUDA_MPS_PIPE_DIRECTORY"] in lines["mps"]["finding"]


def test_a_green_context_is_a_share_where_there_is_no_mps(tmp_path):
    ended = start(plan_of(), "green", tmp_path, NOWHERE, NOWHERE)
    if "makes none" in ended[1][2]:
        pytest.skip(f"no green contexts here: {ended[1][2]}")
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert ended[0][1]["sum"] == ended[1][1]["sum"]


def test_a_gpu_of_another_type_than_the_plans_is_refused_on_both_ranks(mps, tmp_path):
    plan = plan_of(infer=1.0)
    train, infer = plan.groups
    other = attrs.evolve(infer, device=attrs.evolve(infer.device, name="Tesla T4"))
    ended = start(attrs.evolve(plan, groups=(train, other)), "", tmp_path, mps, mps)
    check_refused(ended, "device (the device) was Tesla T4 when group 'infer' was profiled and is", by=1)


def test_a_script_that_forgets_its_share_is_refused_on_both_ranks(mps, tmp_path):
    ended = start(plan_of(), "forgets", tmp_path, mps, mps)
    check_refused(ended, "share (the share of the GPU's SMs) was 0.5 when group 'infer' was profiled and is 1 in this job", by=1)


def test_a_share_without_a_daemon_is_refused_on_both_ranks(tmp_path):
    asks = NOWHERE | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    ended = start(plan_of(), "forgets", tmp_path, NOWHERE, asks)
    check_refused(ended, "is 1 (no MPS daemon answers at /nonexistent) in this job", by=1)


@pytest.mark.parametrize("case", ["too late", "too late, moved later"])
def test_a_share_that_came_too_late_is_seen_by_its_sms(mps, tmp_path, case):
    ended = start(plan_of(), case, tmp_path, mps, mps)
    check_refused(ended, "rank 1 may use ", " SMs of its ", "but its group 'infer' has share 0.5: call qsync_torch.use_share")


def test_use_share_says_that_cuda_has_started(mps, tmp_path):
    ((status, _, sentence),) = start(plan_of(train=0.5), "CUDA first, alone", tmp_path, mps | {"WORLD_SIZE": "1"})
    assert status == 1
    assert "here CUDA has started before" in sentence
    check_refused(start(plan_of(), "CUDA first", tmp_path, mps, mps), "here CUDA has started before", by=1)


def test_two_ranks_on_one_gpu_are_refused_under_nccl(mps, tmp_path):
    ended = start(plan_of(0.5, 0.5), "one GPU", tmp_path, mps, mps)
    check_refused(ended, "ranks 0, 1 are on one GPU (", "which NCCL does not allow")


def test_two_groups_on_one_gpu_share_it_under_gloo_as_long_as_there_is_enough_of_it(mps, tmp_path):
    check_refused(start(plan_of(0.75, 0.5), "gloo, one GPU", tmp_path, mps, mps), "('train', 'infer') add up to 1.25 of it")
    ended = start(plan_of(0.5, 0.5), "gloo, one GPU", tmp_path, mps, mps)
    assert [status for status, _, _ in ended] == [0, 0], ended


def test_memory_is_capped(mps, tmp_path):
    ended = start(plan_of(memory_bytes=2 * 2**30), "over the cap", tmp_path, mps, mps)
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert [found.get("capped", False) for _, found, _ in ended] == [False, True]


def test_memory_that_a_gpu_does_not_have_is_refused_on_both_ranks(mps, tmp_path):
    plan = plan_of(memory_bytes=2**42)
    check_refused(start(plan, "forgets", tmp_path, mps, mps | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}), "has memory 4", by=1)
