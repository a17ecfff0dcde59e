"""A whole training step of an applied model in one CUDA graph: a replay computes what the eager step would."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from qsync_core.ir.op_id import OpId  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402

INT8 = attrs.evolve(Variant.of(Precision.INT8), output=Precision.BFLOAT16)
BOTH = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 32, 3, padding=1)
        self.a, self.b = torch.nn.Linear(32, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.b(torch.relu(self.a(torch.relu(self.conv(x)).mean((2, 3)))))


@pytest.mark.parametrize("variant", [INT8, BOTH], ids=["16-bit gradients", "int8 gradients"])
def test_a_replay_computes_what_the_eager_step_does(variant):
    """With stochastic rounding: the graph keeps the random numbers of the step in which it was captured."""
    pytest.importorskip("triton")
    from qsync_torch import apply_

    torch.manual_seed(0)
    model = Net().to("cuda", memory_format=torch.channels_last)
    applied = apply_(model, {OpId("conv"): INT8, OpId("a"): variant, OpId("b"): variant}, backend="triton+aten")
    x = torch.randn(16, 8, 8, 8, device="cuda").to(memory_format=torch.channels_last)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradients = step()
    captured = applied.step
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
            model.a.weight.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        found = [loss.clone(), *(gradient.clone() for gradient in gradients)]
        applied.step = captured - 1
        expected_loss, expected = step()
        for a, b in zip(found, [expected_loss, *expected], strict=True):
            assert ((a - b).norm() / b.norm().clamp(min=1e-12)).item() < 1e-3
