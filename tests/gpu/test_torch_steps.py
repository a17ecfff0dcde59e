"""Whole int8 operators on a CUDA device: against float64, and in a captured graph, whoever runs the kernels."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.ir.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32, rounding=Rounding.NEAREST)
BOTH = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
CHAINS = ["aten", "triton+aten", "cutlass+triton+aten"]


def expected_gradients(x, weight, grad):
    """In float64, of the dequantized operands and the gradient quantized after multiplication by the weight's scales."""
    from qsync_torch.quantize import quantize

    q_x, s_x = quantize(x, Precision.INT8)
    q_w, s_w = quantize(weight, Precision.INT8, Granularity.PER_CHANNEL)
    q_g, s_g = quantize(grad * s_w, Precision.INT8)
    seen = q_g.double() * s_g.double() / s_w.double()
    return seen @ (q_w.double() * s_w.double()[:, None]), seen.t() @ (q_x.double() * s_x.double())


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("m, k, n", [(128, 256, 64), (1000, 768, 320), (33, 72, 40)])
def test_int8_gradients_equal_float64(chain, m, k, n):
    from qsync_torch.operators import linear

    x, weight = torch.randn(m, k, device="cuda", requires_grad=True), torch.randn(n, k, device="cuda", requires_grad=True)
    grad = torch.randn(m, n, device="cuda")
    linear(x, weight, None, BOTH, backend=chain).backward(grad)
    for found, expected in zip((x.grad, weight.grad), expected_gradients(x.detach(), weight.detach(), grad), strict=True):
        # A scale that differs in its last bit may move values that lie on a tie by one step.
        assert ((found - expected).norm() / expected.norm()).item() < 2e-3


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("variant", [INT8, BOTH], ids=["16-bit gradients", "int8 gradients"])
def test_a_step_is_captured_in_a_graph_and_replayed(chain, variant):
    from qsync_torch.operators import linear

    x, weight = torch.randn(64, 128, device="cuda"), torch.randn(96, 128, device="cuda", requires_grad=True)
    grad = torch.randn(64, 96, device="cuda")

    def step():
        weight.grad = None
        linear(x, weight, None, variant, backend=chain).backward(grad)
        return weight.grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    replayed = found.clone()
    assert torch.equal(replayed, step())
