"""Host time of int8 layers, forward and backward, with kernels that do nothing.

    PYTHONPATH=... python bench/structure/step_driver.py TREE [--profile]

Runs in a process of its own, with the packages of the tree and the backend ``null`` on its path.  It answers each line on stdin
(``linear``, ``conv2d``) with the microseconds of processor time that one layer takes, so that two trees can take turns
every few milliseconds and whatever else the machine does slows both.  ``--profile`` prints where the time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

LAYERS = 16
"""In a row, so that what happens once a step is shared as it is in a model."""
STEPS, WARM_UP, PROFILED = 6, 30, 200


def linears() -> tuple[nn.Module, torch.Tensor]:
    """Linear layers and an activation, both small: PyTorch's own kernels should not show."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS))), torch.zeros(4, 16)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """The same with convolutions."""
    return nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(LAYERS))), torch.zeros(1, 8, 4, 4)


KINDS = {"linear": linears, "conv2d": convolutions}


def compare_nothing() -> None:
    """Have a recorded call taken for what Python does, where the tree has replays: memory that no kernel writes has any bits."""
    if importlib.util.find_spec("qsync_torch.replaying") is not None:
        importlib.import_module("qsync_torch.replaying.recording")._does_the_same = lambda *_: True  # type: ignore[attr-defined]


def make_step(kind: str) -> Callable[[], None]:
    """A forward and a backward pass in int8."""
    import qsync_torch

    model, x = KINDS[kind]()
    x.requires_grad_()
    qsync_torch.apply_(model, {f"{index}#0": "int8" for index in range(LAYERS)}, backend="null")
    leaves = (x, *model.parameters())
    grad = torch.zeros_like(model(x))

    def step() -> None:
        torch.autograd.grad(model(x), leaves, grad)

    return step


def time_us(step: Callable[[], None]) -> float:
    """Processor time of one layer in microseconds, over a few milliseconds."""
    start = time.thread_time_ns()
    for _ in range(STEPS):
        step()
    return (time.thread_time_ns() - start) / (1000 * STEPS * LAYERS)


def serve() -> None:
    """Answer each line on stdin, the name of a step, with its time once more."""
    steps = {kind: make_step(kind) for kind in KINDS}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    gc.disable()
    for line in sys.stdin:
        print(time_us(steps[line.strip()]), flush=True)
        gc.collect()


def profile(step: Callable[[], None]) -> None:
    """Print the functions that take most time themselves."""
    for _ in range(WARM_UP):
        step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(PROFILED):
        step()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    import qsync_torch

    tree = arguments.tree.resolve()
    assert Path(qsync_torch.__file__).is_relative_to(tree), f"{qsync_torch.__file__} is not below {tree}"
    torch.set_num_threads(1)
    compare_nothing()
    if arguments.profile:
        for kind in KINDS:
            print(kind)
            profile(make_step(kind))
    else:
        serve()
