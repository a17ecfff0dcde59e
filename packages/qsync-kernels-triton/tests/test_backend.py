"""What the backend offers and refuses; none of it needs a GPU, torch or triton."""

from __future__ import annotations

import attrs
import pytest

from qsync_core.backend import BACKEND_API_VERSION, KernelBackend, KernelConfig, KernelRequest, Op
from qsync_core.errors import BackendError
from qsync_core.precision import Precision
from qsync_core.variant import Variant
from qsync_kernels_triton.backend import TritonBackend
from qsync_kernels_triton.config import QuantizeConfig

INT8 = Variant.of(Precision.INT8)
ON_H100 = KernelRequest(Op.QUANTIZE, INT8, ((64, 64),), device_kind="cuda", compute_capability="9.0")


@pytest.fixture(autouse=True)
def _torch_and_triton_are_found(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def test_it_is_a_backend_of_this_api():
    backend = TritonBackend()
    assert isinstance(backend, KernelBackend)
    assert (backend.name, backend.api_version) == ("triton", BACKEND_API_VERSION)
    (spec,) = backend.kernel_specs()
    assert (spec.op, spec.compute, spec.device_kinds, spec.min_compute_capability) == ("quantize", ("int8",), ("cuda",), "8.0")


def test_quantization_to_int8_on_a_recent_gpu_is_supported():
    assert TritonBackend().unsupported_reasons(ON_H100) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op": Op.LINEAR_OUTPUT}, "it offers quantize only so far, not linear.output"),
        ({"op": Op.CONV2D_GRAD_WEIGHT}, "it offers quantize only so far, not conv2d.grad_weight"),
        ({"variant": Variant.of(Precision.FLOAT16)}, "it quantizes to int8 only, not to float16"),
        ({"variant": Variant.of(Precision.FLOAT8_E4M3FN)}, "it quantizes to int8 only, not to float8_e4m3fn"),
        ({"variant": attrs.evolve(INT8, symmetric=False)}, "zero points are in the reference alone"),
        ({"device_kind": "cpu", "compute_capability": ""}, "its kernels run on CUDA devices, and this request is for a cpu device"),
        ({"compute_capability": "7.5"}, "Triton needs compute capability 8.0 or higher, and this device's is 7.5"),
        ({"compute_capability": ""}, "Triton needs compute capability 8.0 or higher, and this device's is unknown"),
        ({"contiguous": False}, "it needs dense operands"),
        ({"shapes": ((2**16, 2**15),)}, "it takes tensors of at most 2147483647 elements, and this one has 2147483648"),
    ],
)
def test_everything_else_is_refused_with_its_one_reason(change, reason):
    reasons = TritonBackend().unsupported_reasons(attrs.evolve(ON_H100, **change))
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_ten_follows_nine_in_compute_capabilities():
    assert TritonBackend().unsupported_reasons(attrs.evolve(ON_H100, compute_capability="10.0")) == []


def test_a_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else object())
    assert TritonBackend().unsupported_reasons(ON_H100) == [
        "triton can not be found; install qsync-kernels-triton[triton]",
    ]


def test_building_what_is_refused_raises_with_the_reason():
    request = attrs.evolve(ON_H100, op=Op.LINEAR_OUTPUT)
    with pytest.raises(BackendError, match=r"backend triton can not run linear.output on \[\(64, 64\)\]: it offers quantize only"):
        TritonBackend().build(request, KernelConfig())


def test_every_candidate_configuration_can_be_read_back():
    candidates = TritonBackend().candidate_configs(ON_H100)
    assert [str(QuantizeConfig.parse(candidate.text)) for candidate in candidates] == [c.text for c in candidates]
    assert len({candidate.text for candidate in candidates}) == len(candidates)
    assert QuantizeConfig.parse("") == QuantizeConfig()


@pytest.mark.parametrize(
    "text", ["block=100;warps=4", "block=64", "warps=4;block=64;stages=2", "block=64;warps=3", "fast", "block=x;warps=4"]
)
def test_a_configuration_that_can_not_be_read_is_quoted(text):
    with pytest.raises(BackendError) as caught:
        TritonBackend().build(ON_H100, KernelConfig(text))
    assert f"can not read the configuration {text!r}" in str(caught.value)
    assert "block=4096;warps=8" in str(caught.value)
