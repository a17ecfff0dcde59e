"""Recomputation, gradients of one's own, hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from robustness.zoo.entries import CLASSES, WIDTH, entry
from robustness.zoo.layers import block, mlp


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant, self.stem, self.body, self.out = (
            use_reentrant,
            nn.Linear(WIDTH, WIDTH),
            block(),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.body, self.stem(x), use_reentrant=self.use_reentrant))


@entry()
def checkpointed() -> nn.Module:
    return _Checkpointed(use_reentrant=False)


@entry()
def checkpointed_reentrant() -> nn.Module:
    return _Checkpointed(use_reentrant=True)


@entry()
class CheckpointedMethod(nn.Module):
    """Checkpoints a method with a functional call inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, CLASSES)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.part, x, use_reentrant=False))


class _CheckpointedClosure(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.out, self.use_reentrant = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), use_reentrant
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(lambda t: F.linear(t, self.weight).relu(), self.stem(x), use_reentrant=self.use_reentrant))


@entry()
def checkpointed_closure() -> nn.Module:
    return _CheckpointedClosure(use_reentrant=False)


@entry()
def checkpointed_closure_reentrant() -> nn.Module:
    return _CheckpointedClosure(use_reentrant=True)


class _Rerun(torch.autograd.Function):
    """Checkpointing of one's own make, as in guided-diffusion."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, length: int, *args: Any) -> Any:
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run_function(*[x.view_as(x) for x in inputs])
        return (None, None, *torch.autograd.grad(output, inputs + ctx.parameters, output_grads, allow_unused=True))


@entry()
class OwnCheckpoint(nn.Module):
    """Checkpoints a method with a functional call and a module inside by an autograd function of its own; only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.linear(x, self.weight).relu()).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if torch.compiler.is_exporting():
            return self.out(self.part(x))
        return self.out(_Rerun.apply(self.part, 1, x, self.weight, *self.inner.parameters()))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@entry()
class OwnFunction(nn.Module):
    """An autograd function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_Square.apply(self.first(x)))


@entry()
class OwnProduct(nn.Module):
    """An autograd function that multiplies with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_Straight.apply(x, self.weight).relu())


@entry()
def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 0.5)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


@entry()
def full_backward_hook() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))
    return model


@entry()
class GradientHook(nn.Module):
    """Scales a gradient by a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return self.out(y.relu())
