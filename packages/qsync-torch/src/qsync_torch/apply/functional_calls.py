"""Functional calls: ``fqn.linear#k`` in a plan is the k-th call of ``F.linear`` that the module ``fqn`` makes (or ``F.conv2d``).

While a module's forward runs it is the *site* of the functional calls it makes itself; those of its children are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from qsync_core.geometry import Pair


class OperatorCall(Protocol):
    """Stands where a model calls an adjustable operator."""

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In place of ``F.linear``."""
        ...

    def conv2d(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """In place of ``F.conv2d``."""
        ...


class CallSite:
    """A module that makes functional calls a plan names: by operator name (``linear``, ``conv2d``) the calls by index."""

    def __init__(self, calls: Mapping[str, Mapping[int, OperatorCall]]) -> None:
        self.calls = calls
        self.counts: dict[str, int] = dict.fromkeys(calls, 0)


class CallSites:
    """The sites of a model, and which one is running."""

    def __init__(self) -> None:
        self._running: list[CallSite | None] = []
        self.all: list[CallSite] = []

    def enter(self, site: CallSite | None) -> None:
        """A module's forward begins; None for one that makes no planned calls itself."""
        if site is not None and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            # Inside a backward pass this is gradient checkpointing, which runs the forward again: the calls are the same ones.
            site.counts = dict.fromkeys(site.calls, 0)
        self._running.append(site)

    def leave(self) -> None:
        """A module's forward ends."""
        self._running.pop()

    def start_step(self) -> None:
        """The model's forward begins: calls are counted from 0."""
        self._running.clear()
        for site in self.all:
            site.counts = dict.fromkeys(site.calls, 0)

    def next_call(self, name: str) -> OperatorCall | None:
        """What replaces the functional call that the model makes now; None where no plan names it."""
        site = self._running[-1] if self._running else None
        if site is None or name not in site.calls:
            return None
        index = site.counts[name]
        site.counts[name] = index + 1
        return site.calls[name].get(index)


def places(model: nn.Module, sites: Mapping[str, CallSite]) -> list[tuple[nn.Module, CallSite | None]]:
    """The modules whose forward enters a site, or None: the owners of the sites, by FQN, and all modules inside them.

    A module inside an owner makes no planned calls itself, and the owner may call it by itself (those of a ModuleList are).
    """
    owners: dict[nn.Module, CallSite | None] = {model.get_submodule(owner): site for owner, site in sites.items()}
    inside = dict.fromkeys(module for owner in owners for module in owner.modules() if may_call_functions(module))
    return list((inside | owners).items())


def may_call_functions(module: nn.Module) -> bool:
    """False for PyTorch's own leaves without parameters (ReLU, pooling, dropout), which run in any format."""
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or next(module.children(), None) is not None or next(module.parameters(recurse=False), None) is not None
