"""``compile``: ``torch.compile`` for a model under a plan, with fused chains (docs/design/fused-chains.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule

from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_torch.apply.applied_plan import MARK, AppliedPlan
from qsync_torch.compiling.rewriting import fuse_chains

BACKENDS = ("inductor", "aot_eager")


def compile(
    model: nn.Module | AppliedPlan,
    *,
    saved: Precision | str | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> nn.Module:
    """``torch.compile`` for a model under a plan: what produces the activation of an 8-bit product writes its 8-bit copy too.

    Batch norm with what follows it, layer norm with the sum before it, GELU, SiLU and ReLU run as one kernel forward and one
    backward, of the backends that the plan names for the operator that reads the result.  What no such kernel is for is compiled
    as ``torch.compile`` compiles it, and so is every chain before an operator in a float format (docs/training.md#compiling).

    Args:
        model: after ``apply_``: the model, what it returned, or DistributedDataParallel around the model.
        saved: ``"int8"`` keeps the inputs of normalizations and of GELU and SiLU for backward in 8 bit; by default they are kept
            as they are.
        backend: what compiles the rest: ``inductor``, or ``aot_eager``, which runs PyTorch's own kernels and needs no compiler.
        mode, options, fullgraph, dynamic: as of ``torch.compile``; mode and options are inductor's.

    Returns:
        What ``torch.compile`` returns.

    Raises:
        PlanError: where no plan is in force on the model, or an argument is none of those above.
    """
    module = model.model if isinstance(model, AppliedPlan) else model
    if not any(MARK in part.__dict__ for part in module.modules()):
        raise PlanError("no plan is in force on this model: call apply_ (or hybrid) first; without a plan use torch.compile")
    if saved not in (None, "int8"):
        raise PlanError(f"inputs are saved for backward as they are or in int8, got saved={str(saved)!r}")
    if backend not in BACKENDS:
        raise PlanError(f"what compiles the rest is {' or '.join(BACKENDS)}, got backend={backend!r}")
    if backend != "inductor" and (mode is not None or options is not None):
        raise PlanError(f"mode and options are inductor's, and the backend is {backend!r}: leave them out")
    kept, compile_rest = None if saved is None else Precision(saved), _compiler(backend, mode, options or {})

    def fusing(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fuse_chains(graph, kept)
        return compile_rest(graph, inputs)

    return cast(nn.Module, torch.compile(module, backend=fusing, fullgraph=fullgraph, dynamic=dynamic))


def _compiler(
    backend: str, mode: str | None, options: Mapping[str, Any]
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    if backend != "inductor":
        return cast(Callable[..., Any], torch._dynamo.lookup_backend(backend))

    def inductor(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        patches = (torch._inductor.list_mode_options(mode) if mode else {}) | dict(options)
        return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=patches or None))

    return inductor
