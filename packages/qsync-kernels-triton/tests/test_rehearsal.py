"""A rehearsal compiles what launches would compile, and launches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: it is read there
pytest.importorskip("torch")
pytest.importorskip("triton")

from types import SimpleNamespace

import torch

from qsync_core.kernels.launches import HERE
from qsync_kernels_triton import launching
from qsync_kernels_triton.elementwise import _transpose


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def run_(*arguments):
        script = Path(__file__).with_name("rehearse_without_gpu.py")
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_


@pytest.fixture(scope="module")
def without(run):
    (found,) = run()
    return found


def calls(found):
    """Names, grids, streams and functions; addresses differ from process to process."""
    return [call[:4] for call in found["launched"]]


def test_what_launches_would_compile_is_compiled_and_nothing_else(run, without):
    rehearsed, launched = run("rehearse")
    assert rehearsed["launched"] == launched["compiled"] == []
    assert len(set(without["compiled"])) > 30
    assert sorted(rehearsed["compiled"]) == sorted(without["compiled"])
    assert calls(launched) == calls(without)


def test_what_does_not_compile_is_left_to_its_launch(run, without):
    rehearsed, launched = run("fail")
    assert rehearsed == {"compiled": [], "launched": []}
    assert sorted(launched["compiled"]) == sorted(without["compiled"])
    assert calls(launched) == calls(without)


def test_a_call_that_is_recorded_in_a_rehearsal_is_refused(monkeypatch):
    refused, x = [], torch.zeros(16, 16, dtype=torch.int8)
    launch = launching.Launch(_transpose, {"ROWS": 16, "COLUMNS": 16})
    monkeypatch.setattr(launch, "_function", SimpleNamespace(warmup=lambda *arguments, **options: None))
    monkeypatch.setattr(HERE, "recorder", SimpleNamespace(refuse=refused.append))
    with launching.rehearsal():
        launch((1, 1, 1), None, (x, x), (16, 16))
    assert refused == ["it is compiled, and not launched"]


def test_a_rehearsal_that_is_interrupted_ends():
    with pytest.raises(KeyboardInterrupt), launching.rehearsal():
        raise KeyboardInterrupt
    assert not launching._HERE.rehearses
    with launching.rehearsal():  # which no other one is in the way of
        pass
