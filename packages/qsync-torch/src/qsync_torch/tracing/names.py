"""Names of operators: from the module that made a call to its ``OpId``.

A call that *is* the module's work (``nn.Linear``, ``nn.ReLU``) has the module's FQN; a functional call has the FQN of the
module whose forward made it, followed by the operator's name.
"""

from __future__ import annotations

import re
from collections import Counter

import torch

from qsync_core.ir.op_id import OpId
from qsync_torch.tracing.export import MODEL_PREFIX

LOSS_SCOPE = "$loss"
"""Scope of what runs outside the model."""


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
        inside = name == MODEL_PREFIX or name.startswith(MODEL_PREFIX + ".")
        if not inside:
            return self.scope_of(outer) if outer is not None else (LOSS_SCOPE, None)
        module = self._model.get_submodule(name[len(MODEL_PREFIX) + 1 :])
        return self._first_name[module], module


def is_module_work(module: torch.nn.Module | None) -> bool:
    """True for a leaf of ``torch.nn`` that runs its own forward: its one operator is named after it."""
    return module is not None and type(module).__module__.startswith("torch.nn.modules.") and next(module.children(), None) is None


class Names:
    """Gives out OpIds in the order of execution, counting the calls of each name."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def claim(self, fqn: str) -> OpId:
        """The next call of that name."""
        op_id = OpId(fqn, self._calls[fqn])
        self._calls[fqn] += 1
        return op_id


def functional_fqn(scope: str, name: str) -> str:
    """FQN of a functional call: ``encoder.linear``; in the root module ``linear``."""
    return f"{scope}.{name}" if scope else name
