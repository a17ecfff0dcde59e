"""What the MPS control daemon says, by a program that answers like it."""

from __future__ import annotations

import pytest

from qsync_core.errors import PlanError
from qsync_core.plugins.doctor import Status
from qsync_torch.distributed.ranks import asked_share
from qsync_torch.doctor import machine as doctor
from qsync_torch.sharing import mps
from qsync_torch.sharing.mps import Daemon, find_daemon


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Install a control program with this body, alone in PATH but for the shell's own."""

    def install(body: str) -> None:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f"#!/bin/sh\nread -r command\n{body}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    return install


def test_servers_have_their_status(control):
    control('case "$command" in get_server_list) echo 17; echo 23;; "get_server_status 17") echo ACTIVE;; *) echo FAULT;; esac')
    assert find_daemon() == Daemon(servers={17: "ACTIVE", 23: "FAULT"})


def test_a_daemon_without_a_server_answers(control):
    control("exit 0")
    assert find_daemon() == Daemon()


def test_no_daemon(control, tmp_path):
    control("echo 'Cannot find MPS control daemon process' >&2; exit 1")
    assert find_daemon() == Daemon(f"no MPS daemon answers at {tmp_path / 'pipes'}")


def test_a_daemon_that_does_not_answer(control, tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "_TIMEOUT_S", 0.2)
    control("exec sleep 20")
    (tmp_path / "pipes").mkdir()
    (tmp_path / "pipes" / "control").touch()
    assert find_daemon().problem == f"the MPS daemon at {tmp_path / 'pipes'} does not answer within 0.2 s"


def test_where_the_program_is_not_installed_its_pipe_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert find_daemon().problem == f"no MPS daemon answers at {tmp_path}"
    (tmp_path / "control").touch()
    assert find_daemon() == Daemon()


@pytest.mark.parametrize("text", ["half", "0", "-5", "101", "nan"])
def test_a_percentage_that_is_none_is_refused(text):
    with pytest.raises(PlanError, match=f"PERCENTAGE is '{text}'; set it to a percentage above 0 and at most 100"):
        asked_share({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": text})


def test_gpus_are_named_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nTesla T4\\nNVIDIA H200\\n'\n")
    program.chmod(0o755)
    assert mps.gpu_names() == ("NVIDIA H200", "Tesla T4")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert mps.gpu_names() == ()


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(doctor.torch.backends.cuda, "is_built", lambda: True)


def test_doctor_says_that_there_is_no_daemon_and_warns_a_process_that_asks_for_a_share(cuda_build, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    (line,) = doctor.mps_lines(Daemon("no MPS daemon answers at /p"))
    assert (line.finding, line.status) == ("no MPS daemon answers at /p", Status.INFO)
    assert "a group with a share below 1 needs one: " in line.advice
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    (line,) = doctor.mps_lines(Daemon("no MPS daemon answers at /p"))
    assert line.status is Status.WARNING
    assert line.finding.endswith("; CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 50")


def test_doctor_says_what_to_do_after_a_client_died(cuda_build):
    (line,) = doctor.mps_lines(Daemon(servers={17: "ACTIVE"}))
    assert line.status is Status.OK
    assert "servers 17 ACTIVE" in line.finding
    _, line = doctor.mps_lines(Daemon(servers={17: "ACTIVE", 23: "FAULT"}))
    assert line.status is Status.WARNING
    assert "busy or unavailable: wait some seconds" in line.advice
    assert "echo quit | nvidia-cuda-mps-control" in line.advice


def test_doctor_shows_how_the_allocator_is_configured(cuda_build, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = {line.topic: line.finding for line in doctor.doctor_lines()}
    assert found["cuda allocator"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
