"""The table of kinds, and how one is found: by a function, a module, an operator of ATen, a geometry."""

from __future__ import annotations

from typing import Any

from torch import nn

from qsync_core.geometry import Geometry
from qsync_core.kinds import KINDS, kind_of
from qsync_torch.kinds.convolution import convolution
from qsync_torch.kinds.kind import Operands, OperatorKind, Spelling
from qsync_torch.kinds.linear import LINEAR

OPERATOR_KINDS: dict[str, OperatorKind] = {name: LINEAR if row.of_rows else convolution(row) for name, row in KINDS.items()}
"""Every kind by its name."""

MODULES = tuple(kind.module for kind in OPERATOR_KINDS.values())
"""Classes of modules whose forward is an operator of a kind."""
FUNCTIONS = tuple(kind.function for kind in OPERATOR_KINDS.values())
"""Functions of PyTorch that are operators of a kind."""
WEIGHT_DIMENSIONS = frozenset(kind.weight_dimensions for kind in OPERATOR_KINDS.values())
"""Dimensions that weights of kinds have."""
OF_ROWS = LINEAR
"""The kind that multiplies rows."""
SPELLED: dict[Any, tuple[OperatorKind, Spelling]] = {
    function: (kind, spelling) for kind in OPERATOR_KINDS.values() for function, spelling in kind.spellings.items()
}
"""What is written with a function."""
IN_ATEN: dict[str, tuple[OperatorKind, Operands]] = {
    name: (kind, operands) for kind in OPERATOR_KINDS.values() for name, operands in kind.aten.items()
}
"""What a trace shows as an operator of ATen."""


def kind_with(geometry: Geometry | None) -> OperatorKind:
    """The kind of a convolution with this geometry; of the product of rows where there is none."""
    return OPERATOR_KINDS[kind_of(geometry).name]


def kind_of_module(module: nn.Module | None) -> OperatorKind | None:
    """The kind of a module that runs the forward of its kind's class; None for others.

    A subclass that keeps the forward counts, also one with a computed weight (a parametrization).  One with a forward of its own,
    of its class or patched on the instance, calls functions.
    """
    if module is None or not isinstance(module, MODULES) or not has_class_forward(module):
        return None
    for kind in OPERATOR_KINDS.values():
        if isinstance(module, kind.module):
            own = (getattr(type(module), name, None) for name in kind.methods)
            is_torchs = all(getattr(method, "__code__", None) in _TORCHS for method in own)
            return kind if is_torchs and not any(name in module.__dict__ for name in kind.methods[1:]) else None
    return None


def has_class_forward(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class."""
    patched = module.__dict__.get("forward")
    return patched is None or getattr(patched, "__func__", None) is type(module).forward


def _torchs(kind: OperatorKind) -> list[Any]:
    """The code of PyTorch's own methods; classes are patched too (``nn.Linear.forward = ...``)."""
    codes = [getattr(kind.module, name).__code__ for name in kind.methods]
    file = kind.module.__module__.replace(".", "/") + ".py"
    return [code for code in codes if code.co_filename.replace("\\", "/").endswith(file)]


_TORCHS = frozenset(code for kind in OPERATOR_KINDS.values() for code in _torchs(kind))
"""The code of the methods that a plan replaces; those that were patched before QSync was imported are not among them."""


def reads_own_weight(module: nn.Module, name: str) -> bool:
    """True for a parameter that a plan may store though functional calls read it: the ``weight`` of a module of a class of its own,
    such as a linear layer that has its adapters beside its weight.  PyTorch's own modules read theirs otherwise, and so do
    embeddings.
    """
    is_torchs = type(module).__module__.startswith("torch.nn.") or isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return name == "weight" and not is_torchs


FUNCTIONAL = "it is read by a functional call other than F.linear(x, self.weight) or x @ self.weight.t() of a module of its own"
"""Why a plan does not store a weight that :func:`reads_own_weight` does not take."""


def is_own_forward(module: nn.Module) -> bool:
    """True for a module of a kind's class that runs its own forward, and whose forward a plan can replace."""
    return kind_of_module(module) is not None and getattr(module, "padding_mode", "zeros") == "zeros"
