"""What the producers' tests share: guarded outputs, and the comparison of 8-bit copies with quantization as it is defined."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

_spec = importlib.util.spec_from_file_location("quantize_reference", Path(__file__).parents[1] / "quantize" / "reference.py")
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

EPS = 1e-5
GUARD = 64
FLOAT32 = 2.0**-18
"""Of the magnitudes of all terms: what sums in float32 may be off by."""
HALF_STEP = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Of rounding to a format once; Triton's interpreter cuts bfloat16 off."""


class Outputs:
    """Outputs in the middle of larger memory, so that writes beside them show."""

    def __init__(self):
        self._memory = []

    def empty(self, shape, dtype=torch.float32, channels_last=False):
        """Memory of that shape, filled with what no kernel writes."""
        numel = int(np.prod(shape))
        memory = torch.empty(numel + 2 * GUARD, dtype=dtype)
        memory.view(torch.uint8).fill_(0x5A)
        self._memory.append((memory, numel))
        found = memory[GUARD : GUARD + numel]
        if not channels_last:
            return found.view(shape)
        b, c, h, w = shape
        return found.view(b, h, w, c).permute(0, 3, 1, 2)

    def check(self):
        """Nothing was written outside."""
        for memory, numel in self._memory:
            around = torch.cat([memory[:GUARD], memory[GUARD + numel :]])
            assert (around.view(torch.uint8) == 0x5A).all(), "written outside of an output"


def random(*shape, dtype=torch.float32, seed=0, mean=0.0, deviation=1.0):
    """Normal numbers."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * deviation + mean).to(dtype)


def in_memory(x):
    """The elements as they lie in memory: a channels-last image as (positions, channels)."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]) if x.ndim == 4 else x


def assert_close(found, expected, terms, what):
    """Within float32's errors of terms of that size, and one rounding to the format of ``found``."""
    allowed = FLOAT32 * terms + HALF_STEP[found.dtype] * expected.abs() + 2.0**-24
    excess = ((found.double() - expected).abs() / allowed).max().item() if found.numel() else 0.0
    assert excess <= 1, f"{what}: {excess:.2f} times the error that float32 allows"


def streams(x, offset, groups=1):
    """Which random numbers what follows from ``x`` takes: of all of it, or of each of its rows."""
    return [reference.stream_of(offset, checksum) for checksum in reference.checksums(in_memory(x).contiguous(), groups)]


def assert_is_quantized(q, scale, r, form="int8", rounding="stochastic", seed=0, streams=(0,)):
    """Bit for bit what quantization of the float32 values ``r`` gives, in memory order, a scale for each stream."""
    rows = in_memory(r).reshape(len(streams), -1).numpy()
    expected, expected_scale = reference.quantize(rows, rounding, form, seed, streams)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(in_memory(q).float().numpy().reshape(expected.shape), expected)


def assert_is_rounded(q, scale, x, seed, streams):
    """⌊x / scale + u⌋ with number i of the stream, or of its row's, for element i.

    x is in float64, so that near an integer a value may differ.
    """
    x, scale = in_memory(x).double().numpy(), in_memory(scale).double().numpy() if scale.ndim > 1 else scale.double().numpy()
    position = np.arange(x.size, dtype=np.uint64).reshape(len(streams), -1)
    u = reference.thresholds(seed, position, np.array(streams, dtype=np.uint64)[:, None]).astype(np.float64).reshape(x.shape)
    y = x / scale + u
    differing = in_memory(q).numpy() != np.floor(y)
    assert (np.abs(y - np.rint(y))[differing] < 2e-4).all()
    assert differing.mean() < 0.01


def packed(is_open):
    """(rows, columns) of truth values as bytes, the first column in the lowest bit."""
    wide = torch.nn.functional.pad(is_open.int(), (0, -is_open.shape[1] % 8)).view(is_open.shape[0], -1, 8)
    return (wide * 2 ** torch.arange(8)).sum(2).to(torch.uint8)
