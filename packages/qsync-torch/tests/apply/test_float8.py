"""What float8 operators do without a chip that multiplies float8: their backward, and the reason against their forward."""

import pytest
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.operators import conv2d, linear
from qsync_torch.quantize import quantize

FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN, sixteen_bit=Precision.FLOAT16)


@pytest.mark.parametrize("dtype, sixteen_bit", [(torch.bfloat16, Precision.BFLOAT16), (torch.float16, Precision.FLOAT16)])
def test_gradients_of_saved_float8_copies(device, dtype, sixteen_bit):
    variant = Variant.of(Precision.FLOAT8_E4M3FN, sixteen_bit=sixteen_bit)
    x, weight, grad = (
        torch.randn(12, 20, device=device),
        torch.randn(6, 20, device=device),
        torch.randn(12, 6, device=device).to(dtype),
    )
    q_x, s_x = quantize(x, Precision.FLOAT8_E4M3FN)
    q_w, s_w = quantize(weight, Precision.FLOAT8_E4M3FN, Granularity.PER_CHANNEL)

    def build(op, shapes):
        return AtenBackend().build(KernelRequest(op, variant, shapes, device_kind=device, compute_capability="9.0"), KernelConfig())

    grad_x, grad_w = torch.empty(12, 20, dtype=dtype, device=device), torch.empty(6, 20, device=device)
    build(Op.LINEAR_GRAD_INPUT, ((12, 6), (6, 20)))(grad, q_w, s_w, grad_x)
    build(Op.LINEAR_GRAD_WEIGHT, ((12, 6), (12, 20)))(grad, q_x, s_x, grad_w)
    expected_x = grad.double() @ (q_w.double() * s_w.double()[:, None])
    expected_w = grad.double().t() @ (q_x.double() * s_x.double())
    assert ((grad_x.double() - expected_x).norm() / expected_x.norm()).item() < 1e-2
    assert ((grad_w.double() - expected_w).norm() / expected_w.norm()).item() < 1e-2


@pytest.mark.parametrize(
    "capability, reason",
    [
        ("8.0", "float8 products need compute capability 8.9, and this device's is 8.0"),
        ("8.9", None),
        ("9.0", None),
        ("12.0", None),
    ],
)
def test_which_chips_multiply_float8(capability, reason):
    request = KernelRequest(Op.LINEAR_OUTPUT, FLOAT8, ((16, 32), (16, 32)), device_kind="cuda", compute_capability=capability)
    assert AtenBackend().unsupported_reasons(request) == ([reason] if reason else [])


def test_a_cpu_and_convolutions_have_none():
    with pytest.raises(
        BackendError, match=r"float8 products need a CUDA device of compute capability 8\.9, and this request is for cpu"
    ):
        linear(torch.randn(4, 16), torch.randn(8, 16), None, FLOAT8)
    with pytest.raises(
        BackendError,
        match=r"conv2d\.output in int8, bfloat16, .*, not in float8_e4m3fn; choose one of those",
    ):
        conv2d(torch.randn(1, 4, 4, 4), torch.randn(2, 4, 3, 3), None, FLOAT8)


def test_float8_gradients_are_refused_by_name():
    import attrs

    variant = attrs.evolve(FLOAT8, grad_input=Precision.FLOAT8_E4M3FN)
    request = KernelRequest(Op.LINEAR_GRAD_INPUT, variant, ((16, 8), (8, 32)), device_kind="cuda", compute_capability="9.0")
    assert AtenBackend().unsupported_reasons(request) == [
        "it runs linear.grad_input of float8_e4m3fn operands in bfloat16, float16, float32, not in float8_e4m3fn; "
        "choose one of those as grad_input"
    ]
