"""Traces one call of an int8 linear: which QSync frames stand between the module's forward and the kernel of its product.

    PYTHONPATH=... python bench/structure/call_path.py TREE

Runs in a process of its own, with the packages of the tree on its path, and prints JSON.  It finds what it looks at by calling it,
never by a module's name: kernels are what the backend ``aten`` builds, and a frame is QSync's when its file lies below
``packages/`` of the tree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

BATCH, WIDTH, OUT = 5, 48, 32

Stack = list[tuple[str, str]]
"""File below ``src`` and function of each QSync frame, outermost first."""


def main(tree: Path) -> Stack:
    """The frames of the second forward of a linear module under a plan, on the CPU, up to the kernel, which is included."""
    import qsync_torch

    assert Path(qsync_torch.__file__).is_relative_to(tree), f"{qsync_torch.__file__} is not below {tree}"
    torch.manual_seed(0)
    qsync_torch.apply_(nn.Sequential(nn.Linear(8, 8)), {"0#0": "int8"}, backend="aten")  # loads the backend
    kernels = record_builds(backend_class())
    model = nn.Sequential(nn.Linear(WIDTH, OUT))
    first, second = (torch.randn(BATCH, WIDTH, requires_grad=True) for _ in range(2))  # one that is read again is not cast again
    qsync_torch.apply_(model, {"0#0": "int8"}, backend="aten")
    model(first).sum().backward()
    product = {code_of(kernel) for kernel in kernels["linear.output"]}
    found: Stack = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in product:
            found[:] = stack(frame, model[0], f"{tree / 'packages'}/")

    sys.setprofile(watch)
    try:
        model(second)
    finally:
        sys.setprofile(None)
    return found


def stack(frame: FrameType | None, module: nn.Module, packages: str) -> Stack:
    """QSync's frames inside the call of the module."""
    found: Stack = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(packages):
            found.append((code.co_filename.split("/src/", 1)[-1], code.co_qualname))
        elif code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            break
        frame = frame.f_back
    return found[::-1]


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


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve())))
