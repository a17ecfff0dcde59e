"""Batch norm differentiated twice by the kernels of a GPU, which the CPU does not have: against float64 on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def _twice(x, weight, bias, v):
    """Output, first derivatives, and the derivatives of ⟨first, v⟩."""
    leaves = [operand.clone().requires_grad_() for operand in (x, weight, bias)]
    output = torch.nn.functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, 0.1, 1e-3)
    grad = v[0].clone().requires_grad_()
    first = torch.autograd.grad(output, leaves, grad, create_graph=True)
    inner = sum((g * direction).sum() for g, direction in zip(first, v[1:], strict=True))
    return output, *first, *torch.autograd.grad(inner, [grad, *leaves[:2]])


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (6, 2, 1, 1), (16, 64, 14, 14), (2, 1, 7, 7)], ids=str)
def test_all_derivatives(shape, layout):
    from qsync_torch.observing.normalization import LeanNorms

    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(*sizes, dtype=torch.float64, generator=generator)

    channels = shape[1]
    x, weight, bias = 3 * random(*shape) + 2, random(channels), random(channels)
    weight[0] = 0.0
    v = [random(*shape), random(*shape), random(channels), random(channels)]
    expected = _twice(x, weight, bias, v)

    def on_device(tensor):
        tensor = tensor.float().cuda()
        return tensor.contiguous(memory_format=getattr(torch, layout)) if tensor.dim() == 4 else tensor

    with LeanNorms():
        found = _twice(*map(on_device, (x, weight, bias)), list(map(on_device, v)))
    assert "_BatchNorm" in type(found[0].grad_fn).__name__
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.cpu().double(), e, rtol=2e-4, atol=2e-4 * e.abs().max().item())
