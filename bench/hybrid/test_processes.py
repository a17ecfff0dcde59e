"""Processes of a benchmark end in time, together, and with what they started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid.processes import MPS_FOLDER, Deadline, end_leftover_mps, finish, is_complete, start, start_ranks
from hybrid.workloads import TimeLeft, kept, repeated, threads_of_core, write


def test_a_rank_that_waits_for_one_that_failed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybrid.processes.GRACE_S", 0.2)
    script = (
        "import os, sys, time; r = os.environ['RANK']; time.sleep(60) if r == '0' else sys.exit('no memory ' + os.environ['W'])"
    )
    ranks = start_ranks("a job", [sys.executable, "-c", script], tmp_path / "job.log", {}, of_weak={"W": "at all"})
    begin = time.monotonic()
    assert not finish(ranks, 50)
    assert time.monotonic() - begin < 30
    said = capsys.readouterr().out
    assert "rank 1 of a job ended with 1:" in said
    assert "no memory at all" in said


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(p.pid);"
        "time.sleep(60)"
    )
    started = start("alone", [sys.executable, "-c", script], tmp_path / "alone.log", {})
    while not (text := started.log.read_text().strip()):
        time.sleep(0.05)
    assert not finish([started], 0.1)
    assert started.process.returncode is not None
    stat = Path(f"/proc/{text}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_processes_that_end_well(tmp_path: Path) -> None:
    assert finish([start("nothing", [sys.executable, "-c", ""], tmp_path / "log", os.environ)], 60)


def test_what_is_finished_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert not is_complete(path, "abc")
    path.write_text(json.dumps({"commit": "abc"}))
    assert not is_complete(path, "abc")
    path.write_text(json.dumps({"commit": "abc", "complete": True}))
    assert is_complete(path, "abc")
    assert not is_complete(path, "def")


def test_a_file_goes_on_where_it_was_made_on_such_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    here = {"commit": "abc", "device": "H200", "batch": 8, "machine": {"cpu": "Xeon", "cores": 32, "memory_gib": 251.8}}
    assert kept(path, here) == {}
    write(path, here | {"runs": {"float32": 1}})
    assert kept(path, here)["runs"] == {"float32": 1}
    assert kept(path, here | {"machine": {"cpu": "Xeon", "cores": 32, "memory_gib": 251.7}})
    for other in ({"commit": "def"}, {"device": "H100"}, {"machine": {"cpu": "EPYC", "cores": 32, "memory_gib": 251.8}}):
        assert kept(path, here | other) == {}


def test_mps_daemons_of_a_killed_run_are_ended_and_no_others(tmp_path: Path) -> None:
    daemon = shutil.copy(shutil.which("sleep") or "sleep", tmp_path / "nvidia-cuda-mps-control")
    folders = (f"/tmp/{MPS_FOLDER}abc/pipe1", "/tmp/someone/pipe")
    ours, theirs = (subprocess.Popen([daemon, "60"], env={"CUDA_MPS_PIPE_DIRECTORY": folder}) for folder in folders)
    try:
        while (Path("/proc") / str(theirs.pid) / "comm").read_text() != "nvidia-cuda-mps\n":
            pass  # not yet exec'd
        assert ours.pid in end_leftover_mps()
        assert ours.wait(10) == -signal.SIGKILL
        assert theirs.poll() is None
    finally:
        ours.kill()
        theirs.kill()


def test_time() -> None:
    assert Deadline(0).left(7) == 7
    assert 0 < Deadline(3).left(7) <= 3
    left = TimeLeft(1000)
    assert left.for_another()
    assert not left.for_another(lambda _: 0.5)  # another rank has none
    assert not TimeLeft(-1).for_another()
    assert [repeated(8, seconds) for seconds in (0.01, 0.2, 3.0)] == [8, 3, 2]


def test_hardware_threads_of_one_core(tmp_path: Path) -> None:
    for cpu, said in enumerate(("0,4", "1-2", "1-2")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{said}\n")
    assert [threads_of_core(cpu, tmp_path) for cpu in range(4)] == [(0, 4), (1, 2), (1, 2), (3,)]
