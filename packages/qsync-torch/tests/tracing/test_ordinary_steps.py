"""What an export would see otherwise than training does: conversions, blocks that recompute, guards, layers that are dropped."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import TraceError
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.export import export_step
from qsync_torch.tracing.gradient_order import run_fake
from qsync_torch.tracing.trace import trace


def job_of(model: nn.Module) -> Job:
    return Job(
        "ordinary",
        model,
        lambda step, size: Batch((torch.randn(size, 16),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        4,
    )


def traced(model: nn.Module) -> list[str]:
    """Names of the operators that a plan may pick."""
    return [operator.op_id.fqn for operator in trace(job_of(model)).adjustable]


GRAD = torch.autograd.grad


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.f, self.g, self.h = (nn.Linear(16, 16) for _ in range(4))


class Converts(Layers):
    dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.f = self.f.to(self.dtype)
        return self.f(self.e(x))


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, f: nn.Module, g: nn.Module) -> Any:
        with torch.no_grad():
            a = a + f(b)
        with torch.enable_grad():
            b = b + g(a)
        return a, b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("an export runs no backward")


class Block(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = Reversible.apply(x := self.e(x), x * 2, self.f, self.g)
        return self.h(a + b)


class Guarded(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.e(x)
        if not torch.isfinite(y).all():
            raise RuntimeError("not finite")
        if y.isnan().any() or torch.isinf(y.sum()):
            y = self.f(y)
        return self.g(y)


class Dropped(Layers):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.e(x)
        if not (torch.rand([]) < self.p):
            x = self.f(x)
        if torch.rand(1) < self.p:
            x = self.g(x)
        return x


class Kept(Dropped):
    """As adapters of PEFT drop themselves (LoHa, LoKr)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.e(x)
        if torch.rand(1) > self.p:
            x = self.f(x)
        if torch.rand([]).le(self.p) or not (torch.rand([]) >= self.p):
            x = self.g(x)
        return x


class Sampled(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(self.e(x), F.softplus(self.f(x))).rsample()


class MaskedInPlace(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.filler = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.e(x)
        y[x[:, 0] > 0] = self.filler
        return self.f(y)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Converts(), ["e", "f"]),
        (Block(), ["e", "f", "g", "h"]),
        (Guarded(), ["e", "g"]),
        (Dropped(0.1), ["e", "f"]),
        (Dropped(0.0), ["e", "f"]),
        (Dropped(0.9), ["e", "g"]),
        (Kept(0.1), ["e", "f"]),
        (Kept(0.0), ["e", "f"]),
        (Kept(0.9), ["e", "g"]),
        (Sampled(), ["e", "f"]),
        (MaskedInPlace(), ["e", "f"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_an_ordinary_step_is_traced(model, expected):
    def replaced() -> list[Any]:
        return [torch.autograd.Function.apply, nn.Module.to, torch.set_grad_enabled.__init__, torch.enable_grad.__exit__]

    before = replaced()
    assert traced(model) == expected
    assert replaced() == before
    assert torch.is_grad_enabled()


def test_the_order_of_gradients_is_that_of_the_real_backward():
    """Also where a mask chooses what is written."""
    model = MaskedInPlace()
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.randn(4, 16)).square().mean().backward()
    model.g.requires_grad_(False)
    model.h.requires_grad_(False)
    found = [name for bucket in trace(job_of(model), bucket_cap_mb=1e-6).buckets for name in bucket.parameters]
    assert found == order


class Frozen(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.e(x)
        with torch.set_grad_enabled(False):
            x = self.f(x)
            with torch.enable_grad():
                x = self.g(x)
        return self.h(x)


def test_parts_without_autograd_have_no_gradient():
    model = Frozen()
    model(torch.randn(4, 16)).square().mean().backward()
    expected = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    run = run_fake(export_step(job := job_of(model), job.batch(0, 4)), frozenset(dict(model.named_parameters())), "frozen")
    assert set(run.gradient_order) == expected == {"g.weight", "g.bias", "h.weight", "h.bias"}


@pytest.mark.parametrize("amp", [None, "bfloat16"])
def test_a_model_without_values_has_the_graph_of_one_with_them(amp):
    with torch.device("meta"):
        empty = Block()
    with_values, without = (trace(attrs.evolve(job_of(model), amp=amp)) for model in (Block(), empty))
    assert without == with_values


def test_a_conversion_to_another_format_is_named():
    model = Converts()
    model.dtype = torch.float64
    with pytest.raises(TraceError, match=r"self\.f = self\.f\.to.*: convert the model once, .*forward converts weight of a Linear"):
        traced(model)


@pytest.mark.parametrize(
    "convert",
    [
        lambda module: module.float(),
        lambda module: module.to("cpu", torch.float32).cpu(),
        lambda module: module.to(module.weight, memory_format=torch.channels_last),
        lambda module: module.type(torch.float32),
    ],
)
def test_a_conversion_to_what_a_module_is_does_nothing(convert):
    class Counted(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.f.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return convert(self.f)(self.e(x))

    assert traced(Counted()) == ["e", "f"]


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda x, y: GRAD(y.sum(), x, create_graph=True)[0],
        lambda x, y: torch.autograd.grad(y.sum(), x)[0],
        lambda x, y: y.sum().backward(),
        lambda x, y: torch.autograd.backward(y.sum()),
        lambda x, y: torch.func.grad(lambda x: x.square().sum())(x),
    ],
    ids=["grad, imported before", "grad", "Tensor.backward", "backward", "torch.func.grad"],
)
def test_a_forward_that_differentiates_is_refused(differentiate):
    class Differentiates(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.e(x)
            found = differentiate(x, self.f(x))
            return x if found is None else found

    with pytest.raises(TraceError, match="a plan's graph has no derivatives inside a step"):
        traced(Differentiates())


def test_a_forward_that_asks_for_more_than_an_ordinary_step_has_is_refused():
    class Asks(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.e(x)
            return self.f(y) if (y > 0).all() else y

    with pytest.raises(TraceError, match="a loss that is passed as loss_fn may depend on values"):
        traced(Asks())
