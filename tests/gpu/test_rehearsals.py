"""A profile's launches find Triton's kernels compiled: the rehearsals before them compiled every one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("qsync_kernels_triton")


def test_launches_after_a_rehearsal_compile_nothing(tmp_path):
    """In a process of its own, whose cache of kernels is empty."""
    script = Path(__file__).with_name("rehearsed_profile.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["at launch"] == []
    names = {name.rpartition(".")[2] for name in found["ahead"]}
    assert names > {"quantize_rows", "implicit_gemm", "normalize_rows", "layer_norm_gradient", "activation_gradient"}
    assert len(found["ahead"]) > 40
    assert found["wrong"] == 0
