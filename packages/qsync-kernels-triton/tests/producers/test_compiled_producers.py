"""The producers compile for chips that are not there, and the compiled code reads wide and sums without atomics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightly import nightly_but

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: it is read there
pytest.importorskip("triton")
SHARED_MEMORY = 48 * 1024
"""What every chip gives a program without being asked; none of these kernels needs more."""
CALLS = {
    "normalize_rows": 6,
    "normalize_rows in five": 10,
    "normalize_rows long": 4,
    "activate_rows": 6,
    "activate_rows in one": 4,
    "activate_rows gated": 6,
}
"""Calls of the random generator that one of 256 threads makes for its share of two copies: one for eight elements, at least one
a tile."""


@pytest.fixture(scope="module", params=nightly_but([90], [75, 80, 89, 90]))
def kernels(request, tmp_path_factory):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(Path(__file__).parents[1] / "compile_producers.py"), str(request.param)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return {name.rsplit(" ", 1)[0]: facts for name, facts in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
def test_what_is_compiled_reads_16_bytes_a_thread_and_sums_in_one_order(kernels):
    assert {name for name, facts in kernels.items() if facts["shared"] > SHARED_MEMORY} == set()
    narrow = {"channel_coefficients", "finish_sums", "gradient_reach", "normalize_positions odd e4m3"}
    assert {name for name, facts in kernels.items() if not facts["wide_loads"]} <= narrow
    assert {name for name, facts in kernels.items() if facts["narrow_loads"]} <= {"normalize_positions odd e4m3"}
    assert {name for name, facts in kernels.items() if facts["atomic_sums"]} == set()


def test_rows_draw_each_random_number_once(kernels):
    """A call takes ten rounds of two products.  Where warps made each other's calls too there were four to eight times as many."""
    products = {name: facts["wide_products"] for name, facts in kernels.items() if name in CALLS}
    assert "normalize_rows" in products
    assert {name: count for name, count in products.items() if count > 20 * CALLS[name]} == {}
