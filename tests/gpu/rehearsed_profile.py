"""Profiles a small job with Triton's kernels: ``TRITON_CACHE_DIR=EMPTY python rehearsed_profile.py [COMPILERS]``.

Prints as JSON which kernels the rehearsals compiled and in how many seconds, which ones launches compiled before whole steps were
measured, and how many kernels are wrong.  COMPILERS: threads of a rehearsal, Triton's backend's own number where it is left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from triton import knobs

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_kernels_triton import launching
from qsync_torch.devices import int8_rungs
from qsync_torch.job import Batch, Job
from qsync_torch.kernels import canary
from qsync_torch.profiling import profile as profiling
from qsync_torch.profiling.bench import Efforts
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
AHEAD: list[str] = []
AT_LAUNCH: list[str] = []
SECONDS: list[float] = []


class Net(nn.Module):
    """A stem, and two blocks as ConvNeXt's of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(16, 64, 4, stride=4), nn.Conv2d(64, 128, 2, stride=2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in (64, 128))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for width in (64, 128))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for width in (64, 128))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, convolution in enumerate((self.stem, self.down)):
            x = convolution(x)
            y = self.norms[index](x.permute(0, 2, 3, 1))
            x = x + self.narrow[index](F.gelu(self.wide[index](y))).permute(0, 3, 1, 2)
        y: torch.Tensor = self.head(x.mean((2, 3)))
        return y


def heard(*, fn: Any, is_manual_warmup: bool, **_: Any) -> None:
    """Hear of a compiled kernel."""
    (AHEAD if is_manual_warmup else AT_LAUNCH).append(fn.name)


def timed(rehearse: Callable[..., None]) -> Callable[..., None]:
    """A rehearsal whose seconds are noted."""

    def run(*arguments: Any) -> None:
        begun = time.monotonic()
        rehearse(*arguments)
        SECONDS.append(round(time.monotonic() - begun, 2))

    return run


if __name__ == "__main__":
    if sys.argv[1:]:
        launching._COMPILERS = int(sys.argv[1])
    knobs.runtime.jit_post_compile_hook = heard
    for module in (canary, profiling):
        module.rehearse = timed(module.rehearse)  # type: ignore[attr-defined]
    before_steps: list[list[str]] = []
    steps = profiling._steps
    profiling._steps = lambda *arguments: (before_steps.append(list(AT_LAUNCH)), steps(*arguments))[1]  # type: ignore[assignment]
    torch.manual_seed(0)
    job = Job(
        "rehearsed",
        Net().to(memory_format=torch.channels_last),
        lambda step, size: Batch(
            (torch.randn(size, 16, 64, 64).to(memory_format=torch.channels_last),), target=torch.arange(size) % 10
        ),
        lambda output, batch: F.cross_entropy(output.float(), batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        amp="bfloat16",
    )
    dag = trace(job)
    ladder = (*int8_rungs(Precision.BFLOAT16, dag), Variant.of(Precision.BFLOAT16))
    asked = profiling.ProfileRequest(
        "cuda", ladder=ladder, backend="triton+aten", with_collectives=False, with_chains=True, efforts=Efforts(QUICK, QUICK, QUICK)
    )
    found = profiling.profile(job, dag, asked)
    print(json.dumps({"ahead": AHEAD, "seconds": SECONDS, "at launch": before_steps[0], "wrong": len(found.check.wrong)}))
