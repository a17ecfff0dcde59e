"""The kernels compile for chips that are not there, and the compiled code has what makes them fast."""

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
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}


@pytest.fixture(scope="module", params=nightly_but([90], [80, 90]))
def kernels(request, tmp_path_factory):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(request.param)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = {name.rsplit(" ", 1)[0]: facts for name, facts in json.loads(done.stdout.splitlines()[-1]).items()}
    return request.param, found


@pytest.mark.slow
def test_every_kernel_fits_the_shared_memory_of_its_chip(kernels):
    capability, found = kernels
    assert {name: facts["shared"] for name, facts in found.items() if facts["shared"] > SHARED_MEMORY[capability]} == {}


def test_the_passes_over_long_rows_read_wide_and_move_nothing_between_threads(kernels):
    _, found = kernels
    for name in ("partial_absmax", "partial_absmax bf16", "quantize_from_partials"):
        assert found[name]["wide_loads"] > 0, name
        assert found[name]["conversions"] == 0, name


def test_stored_weights_are_read_and_written_wide(kernels):
    """16 bytes of the result at a time; of NF4 two words of eight elements, of int8 16 elements."""
    _, found = kernels
    for name in ("dequantize_nf4", "dequantize_int8 by row", "dequantize_int8 by block"):
        assert found[name]["wide_stores"] > 0, name
        assert found[name]["contracted"] == 0, name
    assert found["dequantize_nf4"]["wide_stores"] == found["dequantize_nf4 with a rest"]["wide_stores"]
    assert found["dequantize_int8 by row"]["wide_loads"] > found["dequantize_int8 by row"]["wide_stores"] // 2


def test_rounding_is_not_contracted_to_fused_multiply_adds(kernels):
    """The quotient of a scale is an IEEE division, which the compiler builds of fused steps; nothing else may fuse."""
    _, found = kernels
    assert found["quantize_from_partials"]["contracted"] == 0


def test_rows_draw_each_random_number_once(kernels):
    """Two calls of the generator for 16 elements a thread, of ten rounds of two products each."""
    _, found = kernels
    assert found["quantize_rows"]["wide_products"] <= 2 * 20


def test_the_products_run_on_tensor_cores(kernels):
    capability, found = kernels
    instruction = "wgmma" if capability == 90 else "mma"
    assert {
        name for name in ("gemm", "mixed_gemm", "pointwise_grad_weight", "implicit_gemm") if not found[name][instruction]
    } == set()


def test_sums_of_float8_products_are_taken_over_into_float32(kernels):
    """Hopper's tensor cores add float8 products in about 14 bits; each of the 64 sums of a thread is added to its float32 one."""
    capability, found = kernels
    if capability < 90:
        pytest.skip("compute capability 8.0 has no float8 tensor cores")
    assert found["gemm_float8"]["additions"] >= 2 * 64  # and the bias
    assert found["implicit_gemm_float8"]["additions"] >= 64
