"""The chains that a plan fuses, in the graphs of a model: found by their names, and missed where they are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._guards import CompileContext
from torch.fx import GraphModule, Node

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.plan_fit import PlannedChain
from qsync_torch.compiling import graph_nodes as nodes
from qsync_torch.compiling.rewriting import WantedChain, fuse_planned
from qsync_torch.kernels.selection import find_backends
from qsync_torch.tracing.names import is_torch_leaf

_CUT = "no graph has all of it: a graph break or a bucket of DistributedDataParallel cuts it, or the model runs another way"


class PlannedChains:
    """What a plan fuses of a model, and what of that its graphs have had so far."""

    def __init__(self, applied: AppliedPlan, chains: Mapping[OpId, PlannedChain]) -> None:
        """Raises BackendError where a backend is not installed."""
        for chain in chains.values():
            find_backends(chain.choice.backends)
        self._model = applied.model
        self._wanted = {name: WantedChain(name, chain.saved, chain.choice, chain.form) for name, chain in chains.items()}
        self._why = dict.fromkeys(self._wanted, _CUT)
        self._seen: dict[OpId, Any] = {}

    def fuse(self, module: GraphModule) -> None:
        """Put the plan's chains into a graph of ``torch.compile``, and note those that cannot be."""
        names = chain_names(module, self._model)
        found = fuse_planned(module, {node: self._wanted[name] for node, name in names.items() if name in self._wanted})
        if not torch.is_grad_enabled():  # nothing is kept for backward there
            return
        compilation = CompileContext.current_compile_id()
        for name, why in found.items():
            if self._is_in_another_graph(name, compilation):
                why = f"{name.fqn} is called in several graphs, in which calls cannot be told apart"
            self._why[name], self._seen[name] = why, compilation

    def _is_in_another_graph(self, name: OpId, compilation: Any) -> bool:
        """Whether a chain was found in a graph other than an earlier compilation of this one."""
        earlier = self._seen.get(name)
        if earlier is None or compilation is None:
            return False
        return earlier.frame_id != compilation.frame_id or earlier.frame_compile_id == compilation.frame_compile_id

    def check(self, module: nn.Module, *_: Any) -> None:
        """Check, after a forward, that the compiled model has every chain that the plan fuses.

        Raises:
            PlanError: naming one that it has not.
        """
        missing = {name: why for name, why in self._why.items() if why}
        if not missing or not self._model.training or not torch.is_grad_enabled():
            return
        name, why = next(iter(missing.items()))
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise PlanError(
            f"the plan runs chain {name}{more} as fused kernels, and the compiled model does not ({why}): memory and time would "
            "not be what was planned; let one graph have it (fullgraph=True says what breaks graphs, and DistributedDataParallel "
            "may go around the compiled model), or plan with profiles that were made without --chains"
        )


def chain_names(module: GraphModule, model: nn.Module) -> dict[Node, OpId]:
    """What a trace calls the norms and functions of a graph (:func:`qsync_torch.tracing.names.name_operators`).

    Calls are counted within the graph, in its order, parts that are checkpointed included.

    Args:
        module: from ``torch.compile``, which notes the modules that were running.
        model: the model that was traced.
    """
    scopes = scopes_of(model)
    calls: Counter[str] = Counter()
    names: dict[Node, OpId] = {}
    for node in _in_order(module):
        function = nodes.function_of(node)
        if not function:
            continue
        fqn = place_of(node, scopes, function)
        names[node] = OpId(fqn, calls[fqn])
        calls[fqn] += 1
    return names


def scopes_of(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Names and modules of a model, by what ``torch.compile`` notes of a module that was running."""
    return {str(id(part)): (fqn, part) for fqn, part in model.named_modules()}


def place_of(node: Node, scopes: Mapping[str, tuple[str, nn.Module]], function: str) -> str:
    """The name of the module whose work a node is, else that of the module that was running, followed by the function's."""
    stack = (str(key).partition("@")[0] for key in reversed(node.meta.get("nn_module_stack") or {}))
    fqn, part = next((scopes[key] for key in stack if key in scopes), ("", None))
    return fqn if is_torch_leaf(part) and fqn else ".".join(filter(None, (fqn, function)))


def _in_order(module: GraphModule) -> Iterator[Node]:
    parts = nodes.checkpointed_parts(module)
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            yield from _in_order(next(parts))
        else:
            yield node
