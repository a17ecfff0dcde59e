"""Names of operators: from the module that made a call to its ``OpId`` (docs/artifacts.md#names-of-operators).

A call that *is* the module's work (``nn.Linear``, ``nn.ReLU``) has the module's FQN.  A functional call of a linear or
convolution with a parameter has the FQN of that weight, or of the Linear or Conv2d whose weight it is; any other has the FQN of
the module whose forward made it, followed by the operator's name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from qsync_core.errors import TraceError
from qsync_core.ir.op_id import OpId
from qsync_torch.tracing.export import MODEL_PREFIX
from qsync_torch.tracing.graph_values import Draft
from qsync_torch.tracing.running_loss import LOSS_SCOPE


class Scopes:
    """Resolves ``nn_module_stack`` entries of graph nodes to modules of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._first_name = {module: name for name, module in model.named_modules()}

    def scope_of(self, node: torch.fx.Node, outer: torch.fx.Node | None = None) -> tuple[str, torch.nn.Module | None]:
        """FQN (first name in ``named_modules``) and module whose forward made the call; ``$loss`` and None outside the model.

        Nodes of a subgraph may not say where they come from: then it is where ``outer``, the node that runs it, comes from.
        """
        stack = node.meta.get("nn_module_stack")
        name = next(reversed(stack.values()))[0] if stack else ""
        name = re.sub(r"@\d+", "", name)  # export marks second calls of a module
        if name != MODEL_PREFIX and not name.startswith(MODEL_PREFIX + "."):
            return self.scope_of(outer) if outer is not None else (LOSS_SCOPE, None)
        module = _submodule(self._model, name[len(MODEL_PREFIX) + 1 :])
        return self._first_name[module], module


def _submodule(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """A module by its name in an export, which has slices in it (``layers.slice(None, 2, None).0``) where modules are shared."""
    module = model
    for part in name.split(".") if name else ():
        if not (bounds := _SLICE.fullmatch(part)):
            module = module.get_submodule(part)
            continue
        taken = list(module._modules.items())[slice(*(None if bound == "None" else int(bound) for bound in bounds.groups()))]
        # A slice of a Sequential keeps the names of its modules, that of a ModuleList counts them anew.
        names = dict(taken) if isinstance(module, torch.nn.Sequential) else {str(i): child for i, (_, child) in enumerate(taken)}
        module = torch.nn.Module()
        module._modules.update(names)
    return module


_SLICE = re.compile(r"slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)")


def name_operators(drafts: Sequence[Draft]) -> list[OpId]:
    """Names the drafts, in the order of execution; calls of one FQN are counted from 0.

    Raises:
        TraceError: when a module has a name that no operator can have, such as ``C#`` in a ModuleDict.
    """
    operators_of: dict[str, set[str]] = defaultdict(set)
    for draft in drafts:
        operators_of[draft.scope].add(draft.name)
    calls: Counter[str] = Counter()
    op_ids = []
    for draft in drafts:
        is_only_operator = len(operators_of[draft.scope]) == 1 and is_torch_leaf(draft.module)
        is_module_work = draft.kind == "input" or (is_only_operator and not draft.weight_shape)
        name = "" if is_module_work and draft.scope else draft.name
        fqn = draft.address or ".".join(filter(None, (draft.scope, name)))
        try:
            op_ids.append(OpId(fqn, calls[fqn]))
        except ValueError as error:
            raise TraceError(
                f"{error}; give that module of the model another name (the key, where it is in a ModuleDict)"
            ) from error
        calls[fqn] += 1
    return op_ids


def is_torch_leaf(module: torch.nn.Module | None) -> bool:
    """True for a leaf module of ``torch.nn``: its one operator is named after it."""
    return module is not None and type(module).__module__.startswith("torch.nn.modules.") and next(module.children(), None) is None
