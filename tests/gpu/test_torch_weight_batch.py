"""On CUDA the weights of a model are quantized together: in few launches, to the bits of one by one, whoever does it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from qsync_core.ir.op_id import OpId  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402

INT8 = Variant.parse("int8>float32")


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=2), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(64 * 49, 48), torch.nn.Linear(48, 10))
    return net.to("cuda", memory_format=torch.channels_last)


def steps(backend, batched, monkeypatch):
    from qsync_torch import apply_
    from qsync_torch.apply import lowered_call as weight_batch

    asked = []
    original = weight_batch.quantize_many
    with monkeypatch.context() as patch:
        patch.setattr(weight_batch, "quantize_many", lambda xs, *rest: asked.append(len(xs)) or original(xs, *rest))
        if not batched:
            patch.setattr(weight_batch, "DEVICE_KINDS", frozenset())
        net = model()
        apply_(net, {OpId(name): INT8 for name in ("0", "2", "5", "6")}, backend=backend)
        x = torch.randn(8, 3, 16, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        found = []
        for _ in range(2):
            net.zero_grad()
            net(x).square().sum().backward()
            found += [parameter.grad.clone() for parameter in net.parameters()]
    return found, asked


@pytest.mark.parametrize("backend", ["aten", "triton+aten"])
def test_the_bits_are_those_of_one_by_one(backend, monkeypatch):
    torch.backends.cudnn.deterministic = True
    expected, asked = steps(backend, False, monkeypatch)
    assert asked == []
    found, asked = steps(backend, True, monkeypatch)
    assert asked == [4, 4]
    for a, b in zip(expected, found, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-5
