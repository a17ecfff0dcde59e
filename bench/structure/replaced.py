"""Rows S1 and S1b: what of PyTorch is another object once a plan was applied and removed, found by walking PyTorch's modules.

    python bench/structure/replaced.py

A step without a plan runs first, because PyTorch exchanges some functions itself when they are first used (an optimizer's
``step``).  Then every function, class, method and property in a module below ``torch`` is held against what stands there after
QSync was imported, a plan was applied, a step was made, and the plan was removed.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

_OF_CLASSES = (staticmethod, classmethod, property, types.GetSetDescriptorType, types.MemberDescriptorType)
_ALSO = ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.optim", "torch.export", "torch.profiler", "torch.func")
"""What QSync may import: nothing may be new then, and replaced right away."""


class Net(nn.Module):
    """What runs: modules, functional calls, a convolution, attention, and a checkpoint around some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.conv(x).mean(2).transpose(1, 2)
        return self.attention(*3 * (checkpoint(self.part, h, use_reentrant=False),), need_weights=False)[0]

    def part(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(self.linear(h)), self.weight) @ self.weight.t()


VARIANTS = {
    "conv#0": "int8", "linear#0": "int8", "weight#0": "int8", "attention.in_proj_weight#0": "bfloat16",
    "attention.out_proj#0": "bfloat16",
}  # fmt: skip


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of training."""
    optimizer.zero_grad()
    model(torch.randn(2, 3, 6, 6)).square().sum().backward()
    optimizer.step()


def standing() -> dict[str, Any]:
    """Functions, classes and what classes have, by the places in PyTorch's modules where they stand."""
    return {place: value for name in sorted(sys.modules) if _is_torch(name) for place, value in _of_module(name)}


def _is_torch(name: str | None) -> bool:
    return name is not None and (name == "torch" or name.startswith("torch."))


def _of_module(name: str) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(getattr(sys.modules[name], "__dict__", {}).items()):
        if not callable(value):
            continue
        yield f"{name}.{attribute}", value
        if isinstance(value, type) and _is_torch(value.__module__) and value.__module__ == name:
            for own, member in list(vars(value).items()):
                if callable(member) or isinstance(member, _OF_CLASSES):
                    yield f"{name}.{attribute}.{own}", member


def replaced(before: dict[str, Any]) -> list[str]:
    """Places where another object stands than before, or none any more."""
    now = standing()
    return [place for place, value in before.items() if now.get(place) is not value]


def modes_entered(run: Callable[[], None]) -> int:
    """How often a TorchFunctionMode comes into force while something runs, by the height of their stack at each call."""
    found, last = 0, torch._C._len_torch_function_stack()

    def on_event(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal found, last
        now = torch._C._len_torch_function_stack()
        found, last = found + max(0, now - last), now

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    """Print what was replaced while a plan was in force and after it was removed, and the modes that a step entered, as JSON."""
    for name in _ALSO:
        importlib.import_module(name)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = standing()
    from qsync_torch import apply_  # what that replaces is the question

    applied = apply_(model, VARIANTS)
    step(model, optimizer)
    in_force, modes = replaced(before), modes_entered(lambda: step(model, optimizer))
    applied.remove()
    step(model, optimizer)
    left = replaced(before)
    print(json.dumps({"places": len(before), "in force": in_force, "after": left, "modes": modes}))


if __name__ == "__main__":
    main()
