"""A kernel launched again gets what Triton's own launch gave it the first time."""

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

from qsync_kernels_triton.launching import signed_words

WITH_PARTIALS = {
    "partial_absmax", "partial_absmax_of_matrix", "quantize_from_partials", "quantize_twice_from_partials", "channel_statistics",
    "channel_coefficients", "normalize_positions", "reduce_gradient", "apply_gradient", "finish_sums", "normalize_rows",
    "round_normalized", "activate_rows", "round_activated", "layer_norm_gradient", "maxima_of_rows_and_columns",
    "quantize_by_row_and_column",
}  # fmt: skip
"""Kernels with scratch memory, whose address changes from call to call."""


def test_the_second_launch_passes_on_what_the_first_one_did(tmp_path):
    script = Path(__file__).with_name("launch_without_gpu.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    names = {call[0] for first, _ in cases for call in first}
    assert {
        "quantize_rows",
        "gemm",
        "described_gemm",
        "mixed_gemm",
        "implicit_gemm",
        "activation_gradient",
    } <= names
    assert {"normalize_positions", "round_normalized", "round_activated", "layer_norm_gradient", "apply_gradient"} <= names
    assert {"activate_rows", "glu_gradient"} <= names
    for first, second in cases:
        assert len(first) == len(second) > 0
        for one, other in zip(first, second, strict=True):
            assert one[:4] == other[:4]
            if one[0] in WITH_PARTIALS:
                # An address of scratch memory may differ; numbers may not.
                differing = [pair for pair in zip(one[4], other[4], strict=True) if pair[0] != pair[1]]
                assert all(isinstance(value, list) for pair in differing for value in pair)
            else:
                assert one[4] == other[4]


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_words_are_signed_and_give_the_value_back(value):
    low, high = signed_words(value)
    assert all(-(2**31) <= word < 2**31 for word in (low, high))
    assert (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32 == value
