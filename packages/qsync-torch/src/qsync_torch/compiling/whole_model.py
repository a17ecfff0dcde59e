"""A model compiled as a script compiles it, for those who measure it."""

from __future__ import annotations

from typing import cast

import torch

from qsync_core.ir.profile import Compiled, Compiler
from qsync_torch.apply.applied_plan import AppliedPlan


def compiled_model(model: torch.nn.Module, how: Compiled, applied: AppliedPlan | None) -> torch.nn.Module:
    """Compile a model, under a plan or none, or DistributedDataParallel around it, as a script does."""
    if how.by is Compiler.QSYNC and applied is not None:
        from qsync_torch.compiling.compile import compile as compile_chains  # with all that finds chains

        return compile_chains(model, backend=how.backend)
    return cast(torch.nn.Module, torch.compile(model, backend=how.backend))
