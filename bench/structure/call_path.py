"""Traces one call of an int8 linear: which QSync frames stand between the replaced forward and its kernels.

    PYTHONPATH=... python bench/structure/call_path.py TREE

Runs in a process of its own, with the packages of the tree on its path, and prints JSON.  It finds what it looks at by calling it,
never by a module's name, so that it also runs on an older arrangement of the source: kernels are what the backend ``aten`` builds,
and a frame is QSync's when its file lies below ``packages/`` of the tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

BATCH, WIDTH, OUT = 5, 48, 32

Stack = list[tuple[str, str, CodeType]]
"""File below ``src``, function and code of each QSync frame, outermost first."""


def main(tree: Path) -> dict[str, Any]:
    """Trace ``apply_`` and the second step of a model with one linear module, on the CPU.

    Returns:
        ``stacks``: (file, function) of each frame from the replaced forward to the kernel, which is included, of the ``product``
        and of the ``cast`` of its activation; ``deepest``: the same at the deepest point inside the kernel; ``way``: files with any
        frame of that forward outside of kernels, those of the kernels themselves, and the ``installer``, whose frame puts the
        forward into the module; ``with_apply``: files with any frame of ``apply_`` or of that forward, kernels' insides included.
    """
    import qsync_torch

    assert Path(qsync_torch.__file__).is_relative_to(tree), f"{qsync_torch.__file__} is not below {tree}"
    torch.manual_seed(0)
    qsync_torch.apply_(nn.Sequential(nn.Linear(8, 8)), {"0#0": "int8"}, backend="aten")  # loads the backend
    kernels = record_builds(backend_class())
    model = nn.Sequential(nn.Linear(WIDTH, OUT))
    first, second = (torch.randn(BATCH, WIDTH, requires_grad=True) for _ in range(2))  # one that is read again is not cast again
    applying = ApplyTrace(tree, model[0])
    profiled(applying, lambda: qsync_torch.apply_(model, {"0#0": "int8"}, backend="aten"))
    model(first).sum().backward()
    forward = ForwardTrace(tree, model[0], second.shape, kernels)
    profiled(forward, lambda: model(second))
    return {
        "stacks": {what: named(stack) for what, stack in forward.stacks.items()},
        "deepest": {what: named(stack) for what, stack in forward.deepest.items()},
        "way": sorted(forward.way | {applying.installer}),
        "installer": applying.installer,
        "with_apply": sorted(applying.ran | forward.ran),
    }


def named(stack: Stack) -> list[tuple[str, str]]:
    """The stack without its code objects, as JSON can hold it."""
    return [(file, function) for file, function, _ in stack]


def profiled(watch: Callable[[FrameType, str, Any], None], call: Callable[[], object]) -> None:
    """Call with a profile function, and without it again afterwards."""
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)


def backend_class() -> type:
    """The class of the backend ``aten``, among the modules that applying a plan has loaded."""
    found = {
        entry
        for name, module in list(sys.modules.items())
        if name.startswith("qsync_torch")
        for entry in vars(module).values()
        if isinstance(entry, type) and getattr(entry, "name", None) == "aten" and callable(getattr(entry, "build", None))
    }
    if len(found) != 1:
        raise RuntimeError(f"expected one class with name = 'aten' and build() in qsync_torch, found {found}")
    return found.pop()


def record_builds(backend: Any) -> dict[str, list[Any]]:
    """Kernels by operator, filled whenever a backend of the class builds one."""
    kernels: dict[str, list[Any]] = {}
    build = backend.build

    def recording(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        kernel = build(self, request, *arguments, **options)
        kernels.setdefault(str(getattr(request.op, "value", request.op)), []).append(kernel)
        return kernel

    backend.build = recording
    return kernels


def code_of(function: Any) -> CodeType:
    """The code that runs when ``function`` is called: a function's, a method's, a partial's, or a callable object's."""
    while hasattr(function, "func"):
        function = function.func
    function = getattr(function, "__func__", function)
    return function.__code__ if hasattr(function, "__code__") else type(function).__call__.__code__


class Frames:
    """Tells QSync's frames from others and collects the files with a frame in ``ran``."""

    def __init__(self, tree: Path, module: nn.Module) -> None:
        self._packages, self._module = f"{tree / 'packages'}/", module
        self.ran: set[str] = set()

    def is_qsync(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._packages)

    def file(self, frame: FrameType) -> str:
        """The path below ``src``: ``qsync_torch/...``."""
        return frame.f_code.co_filename.removeprefix(self._packages).split("/src/", 1)[-1]

    def stack(self, frame: FrameType | None) -> Stack | None:
        """QSync's frames inside the call of the module; None outside of it."""
        found: Stack = []
        while frame is not None:
            code = frame.f_code
            if self.is_qsync(frame):
                found.append((self.file(frame), code.co_qualname, code))
            elif code.co_name == "_call_impl" and frame.f_locals.get("self") is self._module:
                return found[::-1]
            frame = frame.f_back
        return None


class ApplyTrace(Frames):
    """Watches ``apply_``: the ``installer`` is the file of the innermost frame that has returned when the forward is another."""

    def __init__(self, tree: Path, module: nn.Module) -> None:
        super().__init__(tree, module)
        self._before = self._forward()
        self.installer = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_qsync(frame):
            return
        self.ran.add(self.file(frame))
        if event == "return" and not self.installer and self._forward() is not self._before:
            self.installer = self.file(frame)

    def _forward(self) -> object:
        """What runs as the module's forward: the function, because a bound method is another object at every look."""
        return getattr(self._module.forward, "__func__", self._module.forward)


class ForwardTrace(Frames):
    """Watches one forward of the model: the stack at the product's kernel and at that of its activation's cast."""

    def __init__(self, tree: Path, module: nn.Module, activation: torch.Size, kernels: dict[str, list[Any]]) -> None:
        super().__init__(tree, module)
        self._activation = activation
        self._quantize = {code_of(kernel) for kernel in kernels["quantize"]}
        self._product = {code_of(kernel) for kernel in kernels["linear.output"]}
        self._inside: str | None = None
        self.way: set[str] = set()
        self.stacks: dict[str, Stack] = {}
        self.deepest: dict[str, Stack] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_qsync(frame):
            return
        self.ran.add(self.file(frame))
        stack = self.stack(frame)
        if stack is None:
            return
        kernels = [place for place, (*_, code) in enumerate(stack) if code in self._quantize or code in self._product]
        if not kernels or kernels[0] == len(stack) - 1:
            self.way.add(self.file(frame))
        if kernels and kernels[0] == len(stack) - 1:
            self._inside = self._which(frame)
            if self._inside:
                self.stacks[self._inside] = stack
        if kernels and self._inside and len(stack) > len(self.deepest.get(self._inside, ())):
            self.deepest[self._inside] = stack

    def _which(self, frame: FrameType) -> str | None:
        """``product``, ``cast`` of the activation, or None: a cast of the weight."""
        if frame.f_code in self._product:
            return "product"
        operands = [value for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]
        return "cast" if operands[0].shape == self._activation else None


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve())))
