"""The plugin as the registry sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.plugins.hooks import Candidate
from qsync_core.plugins.registry import Registry
from qsync_kernels_triton import plugin


@pytest.fixture
def registry():
    registry = Registry()
    registry.register(plugin, "qsync-kernels-triton")
    return registry


def test_the_registry_takes_the_backend(registry):
    assert registry.disabled == {}
    assert [backend.name for backend in registry.backends()] == ["triton"]


def test_it_is_never_selected_on_a_cpu(registry):
    request = KernelRequest(Op.QUANTIZE, Variant.of(Precision.INT8), ((8, 8),), device_kind="cpu")
    with pytest.raises(BackendError, match="triton: it runs on CUDA devices, and this request is for cpu"):
        registry.select(request)


@pytest.mark.parametrize(
    ("op", "candidates", "chosen"),
    [
        (Op.BATCH_NORM_OUTPUT, [Candidate("aten"), Candidate("example"), Candidate("triton")], "triton"),
        (Op.LAYER_NORM_GRAD_INPUT, [Candidate("triton"), Candidate("zzz")], "triton"),
        (Op.BATCH_NORM_OUTPUT, [Candidate("aten"), Candidate("example")], None),
        (Op.BATCH_NORM_OUTPUT, [Candidate("aten", latency_ns=9), Candidate("triton")], None),
        (Op.LINEAR_OUTPUT, [Candidate("cutlass"), Candidate("triton")], None),
        (Op.LINEAR_GRAD_WEIGHT, [Candidate("aten"), Candidate("cutlass"), Candidate("triton")], "triton"),
        (Op.LINEAR_GRAD_WEIGHT, [Candidate("aten"), Candidate("cutlass")], None),
        (Op.CONV2D_GRAD_INPUT, [Candidate("aten"), Candidate("triton")], "triton"),
        (Op.CONV2D_GRAD_INPUT, [Candidate("aten", latency_ns=9), Candidate("triton")], None),
    ],
)
def test_producers_and_float_gradients_that_were_never_measured_are_its_own(op, candidates, chosen):
    request = KernelRequest(op, Variant.of(Precision.INT8), ((2, 8, 4, 4),), device_kind="cuda", compute_capability="9.0")
    assert plugin.qsync_select_backend(request, candidates) == chosen


def test_the_doctor_names_the_version_or_what_to_install(registry, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = registry.doctor_lines()
    assert (line.topic, line.status) == ("triton", "info")
    assert "qsync-kernels-triton[triton]" in line.advice


def test_importing_the_kernels_never_asks_cuda_for_anything():
    pytest.importorskip("triton")
    code = """
import torch
def refuse(*args, **kwargs):
    raise RuntimeError("CUDA was asked while importing")
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_capability"):
    setattr(torch.cuda, name, refuse)
import qsync_kernels_triton.plugin, qsync_kernels_triton.quantize.single
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
