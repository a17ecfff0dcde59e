"""Who gets the extension: those who ask for it, and with a sentence where it cannot be had."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qsync_core.errors import BackendError
from qsync_torch import apply_
from qsync_torch.replaying import extension

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "_loaded", None)
    monkeypatch.setattr(extension, "_asked", set())
    monkeypatch.setenv("QSYNC_TUNING", str(tmp_path / "tuning.sqlite"))


@pytest.mark.parametrize("said", [None, "", "0", "background"])
def test_calls_on_a_cpu_run_in_python_unless_asked(said, monkeypatch):
    monkeypatch.delenv(extension.REPLAY_VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(extension.REPLAY_VARIABLE, said)
    assert extension.want(CPU) is None


@pytest.mark.parametrize(("said", "loads"), [("background", True), ("1", True), ("0", False), (None, True)])
def test_measured_steps_wait_for_the_compiler_where_calls_on_a_gpu_are_replayed(said, loads, monkeypatch):
    monkeypatch.delenv(extension.REPLAY_VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(extension.REPLAY_VARIABLE, said)
    made = object()
    monkeypatch.setattr(extension, "_compiled", lambda: "path")
    monkeypatch.setattr(extension, "_import", lambda path: made)
    assert extension.want(torch.device("cuda"), wait=True) is (made if loads else None)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_first_step_asks_for_it(compiles, monkeypatch):
    asked = []
    monkeypatch.setattr(extension, "_make", lambda device, wait: asked.append((device.type, wait)))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    applied = apply_(model, {"0#0": "int8"})
    run = torch.compile(model, backend="aot_eager") if compiles else model
    for _ in range(2):
        run(torch.randn(4, 16)).sum().backward()
    assert asked == [("cpu", False)]
    applied.remove()


def test_without_a_compiler_calls_on_a_gpu_run_in_python(monkeypatch, caplog):
    monkeypatch.setenv(extension.REPLAY_VARIABLE, "background")
    monkeypatch.setenv("CXX", "false")
    assert extension.want(torch.device("cuda"), wait=True) is None
    assert "false does not compile replay.cpp" in caplog.text
    assert "8-bit calls run in Python" in caplog.text


def test_a_process_that_ends_leaves_no_compiler_behind(monkeypatch, tmp_path):
    compiler, began = tmp_path / "compiler", tmp_path / "began"
    compiler.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {began}.part; mv {began}.part {began}; wait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv(extension.REPLAY_VARIABLE, raising=False)
    script = f"""
import pathlib, time, torch
from qsync_torch.replaying import extension
extension.want(torch.device("cuda"))
while not pathlib.Path({str(began)!r}).exists():
    time.sleep(0.05)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    state = Path(f"/proc/{began.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"  # ended, and not reaped
    assert [path.name for path in (tmp_path / "replays").glob("*/*")] == ["lock"]


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(extension.REPLAY_VARIABLE, "yes")
    with pytest.raises(BackendError, match=r"QSYNC_REPLAY is 1 .*, background or 0 .*, got 'yes'"):
        extension.want(CPU)


def test_a_compiler_that_fails_is_told(monkeypatch):
    monkeypatch.setenv(extension.REPLAY_VARIABLE, "1")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BackendError, match=r"false does not compile replay\.cpp"):
        extension.want(CPU)


@pytest.mark.parametrize("above", [False, True], ids=["itself", "above"])
def test_a_folder_that_others_can_write_to_is_not_trusted(monkeypatch, above):
    monkeypatch.setenv(extension.REPLAY_VARIABLE, "1")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BackendError):
        extension.want(CPU)
    folder = next((extension.default_store_path().parent / "replays").iterdir())
    (folder / "qsync_replay.so").touch()  # which would be loaded
    (folder.parent if above else folder).chmod(0o777)
    extension._asked.clear()
    said = f"is below {folder.parent}, which others can write" if above else "can be written by others"
    with pytest.raises(BackendError, match=rf"{said} \(mode 0777\), so code in it cannot be trusted; .* set QSYNC_TUNING to a"):
        extension.want(CPU)


def test_a_compiled_model_is_not_compiled_again_when_the_extension_arrives(monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = torch.nn.Sequential(torch.nn.Linear(64, 64).requires_grad_(False))
    applied = apply_(model, {"0#0": "float32@nf4"})
    run, x = torch.compile(model, backend=backend), torch.randn(4, 64)
    run(x)
    monkeypatch.setattr(extension, "_loaded", object())
    run(x)
    assert len(compiled) == 1
    applied.remove()
