"""The Triton quantization kernel on a real GPU, against the same formulas in float32 on that GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from qsync_core.backend import KernelRequest, Op  # noqa: E402
from qsync_core.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_core.variant import Variant  # noqa: E402


def build(granularity, rounding, shape):
    pytest.importorskip("triton")
    import attrs

    from qsync_kernels_triton.backend import TritonBackend

    variant = attrs.evolve(Variant.of(Precision.INT8, rounding=rounding), x_granularity=granularity)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    request = KernelRequest(Op.QUANTIZE, variant, (shape,), device_kind="cuda", compute_capability=capability)
    backend = TritonBackend()
    if reasons := backend.unsupported_reasons(request):
        pytest.skip("; ".join(reasons))
    return [backend.build(request, config) for config in backend.candidate_configs(request)]


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("shape", [(64, 256, 56, 56), (4608, 768), (3, 1001)])
def test_nearest_equals_the_formula_for_every_configuration(shape, granularity):
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    rows = {Granularity.PER_TENSOR: 1, Granularity.PER_CHANNEL: shape[0], Granularity.PER_ROW: x.numel() // shape[-1]}[granularity]
    flat = x.reshape(rows, -1)
    expected_scale = flat.abs().amax(dim=1) / 127
    expected = (flat / expected_scale[:, None]).round().clamp(-127, 127).to(torch.int8).reshape(shape)
    for kernel in build(granularity, Rounding.NEAREST, shape):
        q, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(rows, device="cuda")
        kernel(x, q, scale, 0, 0)
        assert torch.allclose(scale, expected_scale, rtol=2**-22, atol=0)
        # A scale that differs in its last bit may move a value that lies on a tie; nothing else may differ.
        assert (q.int() - expected.int()).abs().max() <= 1
        assert (q != expected).float().mean() < 1e-4


def test_stochastic_rounding_is_unbiased_and_independent_of_the_configuration():
    x = torch.full((1 << 20,), 0.3, device="cuda")
    x[0] = 127.0
    results = []
    for kernel in build(Granularity.PER_TENSOR, Rounding.STOCHASTIC, tuple(x.shape)):
        q, scale = torch.empty_like(x, dtype=torch.int8), torch.empty(1, device="cuda")
        kernel(x, q, scale, 7, 9)
        results.append(q)
    for q in results[1:]:
        assert torch.equal(q, results[0])
    assert scale.item() == 1.0
    assert abs(results[0][1:].float().mean().item() - 0.3) < 5 * (0.3 * 0.7 / (1 << 20)) ** 0.5
