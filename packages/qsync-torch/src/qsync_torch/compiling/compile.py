"""``compile``: ``torch.compile`` for a model under a plan, with fused chains (docs/design/fused-chains.md)."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.run_folder import RunFolder
from qsync_torch.apply.applied_plan import AppliedPlan, applied_to
from qsync_torch.apply.apply import apply_for
from qsync_torch.caller import Caller
from qsync_torch.compiling import copies_again, gradient_copies, gradient_maxima, gradient_sums, graph_nodes, shape_arguments
from qsync_torch.compiling.copies_again import write_copies_again
from qsync_torch.compiling.cuts import Cuts
from qsync_torch.compiling.gradient_copies import fuse_gradient_copies
from qsync_torch.compiling.gradient_maxima import fuse_gradient_maxima
from qsync_torch.compiling.gradient_sums import fuse_gradient_sums
from qsync_torch.compiling.no_ops import drop_no_ops
from qsync_torch.compiling.planned import PlannedChains
from qsync_torch.compiling.rewriting import fuse_chains
from qsync_torch.compiling.shape_arguments import keep_no_shapes
from qsync_torch.distributed.groups_present import run_folder_of
from qsync_torch.kernels import library_ops, producers

BACKENDS = ("inductor", "aot_eager")
_MODES: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": True},
}
"""The options that a mode of ``torch.compile`` stands for; ``lite`` is none of them, as it runs no passes over graphs."""


def compile(
    model: nn.Module | AppliedPlan,
    plan: PrecisionPlan | RunFolder | str | os.PathLike[str] | None = None,
    *,
    saved: Precision | str | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **applying: Any,
) -> nn.Module:
    """``torch.compile`` for a model under a plan: what produces the activation of an 8-bit product writes its 8-bit copy too.

    Batch norm with what follows it, layer norm with the sum before it, GELU, SiLU and ReLU run as one kernel forward and one
    backward, of the backends that the plan names for the operator that reads the result.  What no such kernel is for is compiled
    as ``torch.compile`` compiles it, and so is every chain before an operator in a float format (docs/compiling.md).

    A plan that says which chains are fused, and how they keep their inputs, is followed to the letter instead: these and no others
    are, before operators in float formats too.  ``apply_`` does not run such a plan, so that it is given to this function.

    Args:
        model: after ``apply_``: the model, what it returned, or DistributedDataParallel around the model.  With a plan: the model.
        plan: what ``apply_`` is to put into force first; :func:`applied_to` has what it returns.
        saved: ``"int8"`` keeps the inputs of normalizations and of GELU and SiLU for backward in 8 bit; by default they are kept
            as they are.  Not with a plan that says that of each chain.
        backend: what compiles the rest: ``inductor``, or ``aot_eager``, which runs PyTorch's own kernels and needs no compiler.
        mode, options, fullgraph, dynamic: as of ``torch.compile``; mode and options are inductor's.  Passes over graphs that
            options name (``joint_custom_pre_pass``, ``post_grad_custom_pre_pass``) run in place of ours, which save memory;
            those of inductor's configuration do not run.
        applying: further arguments of ``apply_`` for the plan, such as ``group``.

    Returns:
        What ``torch.compile`` returns.  Its first forward in training raises a PlanError where a chain that the plan fuses is not
        in the compiled model, or no backend that the plan names for it has its kernels.

    Raises:
        PlanError: where no plan is in force on the model, or an argument is none of those above.
        BackendError: where a backend that the plan names for a chain is not installed.
        QSyncError: what ``apply_`` raises of the plan.
    """
    module = model.model if isinstance(model, AppliedPlan) else model
    if saved not in (None, "int8"):
        raise PlanError(f"inputs are saved for backward as they are or in int8, got saved={str(saved)!r}")
    if backend not in BACKENDS:
        raise PlanError(f"what compiles the rest is {' or '.join(BACKENDS)}, got backend={backend!r}")
    if backend != "inductor" and (mode is not None or options is not None):
        raise PlanError(f"mode and options are inductor's, and the backend is {backend!r}: leave them out")
    if mode is not None and mode not in _MODES:
        raise PlanError(f"inductor's modes in which chains are fused are {', '.join(_MODES)}, got mode={mode!r}: leave it out")
    if plan is None and applying:
        raise PlanError(f"{next(iter(applying))} is for a plan that is put into force, and no plan was given")
    if plan is not None:
        apply_for(Caller("qsync.compile", run_folder_of(plan)), module, plan, fuses=True, **applying)
    applied = applied_to(module)
    if applied is None:
        raise PlanError("no plan is in force on this model: call apply_ (or hybrid) first; without a plan use torch.compile")
    with ExitStack() as undo:
        if plan is not None:
            undo.callback(applied.remove)
        chains = applied.in_model.planned.chains
        planned = None if chains is None else PlannedChains(applied, chains)
        if planned is not None and saved is not None:
            raise PlanError("the plan says of each chain how it keeps its input for backward: leave saved out")
        undo.pop_all()
    kept, compile_rest = None if saved is None else Precision(saved), _compiler(backend, mode, options or {})

    cuts = Cuts(applied)

    def fusing(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        drop_no_ops(graph)
        watched = cuts.read(graph, inputs)
        if planned is None:
            fuse_chains(graph, kept)
        else:
            planned.fuse(graph)
        return watched(compile_rest(graph, inputs))

    compiled = cast(nn.Module, torch.compile(module, backend=fusing, fullgraph=fullgraph, dynamic=dynamic))
    if planned is not None:
        compiled.register_forward_hook(planned.check)
    compiled.register_forward_hook(cuts.check)
    return compiled


def _compiler(
    backend: str, mode: str | None, options: Mapping[str, Any]
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    if backend != "inductor":
        return _aot_eager

    def inductor(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        passes = {"joint_custom_pre_pass": _graph_pass(_rewrite_joint), "post_grad_custom_pre_pass": _graph_pass(_rewrite)}
        patches = {**passes, **_MODES[mode or "default"], **options}
        return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=patches))

    return inductor


def _aot_eager(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def rewritten(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _rewrite(graph.graph)
        # A kernel's fake may misjudge a layout (native_batch_norm_backward on the CPU), and with it whether a view can be had.
        for view in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            view.target = torch.ops.aten.reshape.default
        graph.recompile()
        return boxed_nop(graph, list(inputs))

    def parted(joint: GraphModule, *arguments: Any, **options: Any) -> Any:
        write_copies_again(joint.graph)
        return min_cut_rematerialization_partition(joint, *arguments, **options)

    compilers: dict[str, Any] = {"fw_compiler": rewritten, "bw_compiler": rewritten, "partition_fn": parted}
    return aot_autograd(**compilers, keep_inference_input_mutations=True)(graph, list(inputs))


def _rewrite_joint(graph: Graph) -> None:
    """What is done to forward and backward before autograd parts them."""
    keep_no_shapes(graph)
    write_copies_again(graph)


def _rewrite(graph: Graph) -> None:
    """What is done to forward and backward graphs once autograd has made them."""
    fuse_gradient_copies(graph)
    fuse_gradient_sums(graph)
    fuse_gradient_maxima(graph)


@functools.cache
def _graph_pass(rewrite: Callable[[Graph], None]) -> Any:
    """A rewriting as inductor takes it, whose caches of compiled graphs ask which version it is."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Rewrite(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            parts = (
                copies_again,
                gradient_copies,
                gradient_maxima,
                gradient_sums,
                graph_nodes,
                shape_arguments,
                library_ops,
                producers,
            )
            sources = b"".join(Path(str(part.__file__)).read_bytes() for part in parts)
            return hashlib.sha256(sources + rewrite.__name__.encode()).digest()

    return Rewrite()
