"""What the graph says of each ATen operator: its class, why ``apply_`` cannot address it, and which loss ends the step.

See docs/design/precision-semantics.md#operator-classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from qsync_core.ir.dag import OpClass
from qsync_core.ir.functions import function_of
from qsync_torch.dtypes import PRECISION
from qsync_torch.kinds.kind import OperatorKind
from qsync_torch.kinds.table import kind_of_module
from qsync_torch.tracing.graph_values import Draft, Read


def op_name(target_name: str) -> str:
    """The plain name of an ATen operator: no overload, no marks of in-place or private variants (``add_``, ``_softmax``)."""
    return target_name.split(".")[0].strip("_")


def class_of(name: str, *, has_activation: bool, mixes_float32: bool) -> OpClass:
    """The class of an operator of none of the kinds.

    Args:
        has_activation: it reads at least one floating-point activation.
        mixes_float32: it also reads a parameter, buffer or constant of at least one dimension, which is float32: PyTorch's
            promotion then computes in float32 whatever the activations are.
    """
    if not has_activation:
        return OpClass.FIXED
    op_class = function_of(name).op_class
    return OpClass.FIXED if mixes_float32 and op_class is OpClass.DEPENDENT else op_class


def is_loss(name: str) -> bool:
    """Whether an ATen operator is a loss function."""
    return bool(function_of(name).loss)


def address_of(module: nn.Module | None, scope: str, kind: OperatorKind, weight: Read | None, addresses: Mapping[str, str]) -> str:
    """The FQN that names an operator and its weight; empty where it has the name of its caller.

    Args:
        module: the module whose forward makes the call; ``scope``: its FQN.
        addresses: by the name of a parameter, what operators that run with it are called.
    """
    if weight is None:
        return ""
    if module is not None and scope and kind_of_module(module) is kind:
        return scope
    return addresses.get(weight.value.storage.name, "") if weight.is_parameter and not weight.value.is_view else ""


def weight_reason(weight: Read | None, bias: Read | None, is_own_call: bool) -> str:
    """Why the weight or bias of a call rules it out; empty where they do not.

    A module's own forward may compute its weight (weight_norm, a parametrization): the call is replaced, not the weight.
    """
    if weight is None:
        return "its weight is not a floating-point tensor"
    storage = weight.value.storage
    if storage.writer is not None and storage.weight_only:
        if is_own_call:
            return ""
        return "its weight is computed from parameters in every step (weight_norm, a parametrization or the like), not a parameter"
    if storage.writer is not None:
        return "its weight is an activation, not a parameter"
    if storage.kind != "parameter":
        return f"its weight is {storage.kind} {storage.name!r}, not a parameter"
    if weight.value.is_view:
        return f"its weight is a part or another view of parameter {storage.name!r}, not the whole of it"
    if bias is not None and bias.is_activation:
        return "its bias is computed, not a parameter"
    return ""


def layout_reason(x: Read) -> str:
    """Why the layout of a call's activation rules it out; empty for a dense one."""
    layout = x.tensor.layout
    return "" if layout is torch.strided else f"its input is {str(layout).removeprefix('torch.')}, not dense"


def is_whole_matrix(x: Read | None, weight: Read | None) -> bool:
    """Whether a product is an operator of rows whose weight is stored as (K, N): a whole matrix on the right of an activation."""
    if x is None or weight is None or not x.is_activation or not weight.is_parameter or weight.value.is_view:
        return False
    return weight.tensor.dim() == 2 and weight.tensor.dtype in PRECISION


def loss_kind(drafts: Sequence[Draft], loss: int | None) -> tuple[str, str]:
    """Kind (``cross_entropy``, ``mse``, … or ``custom``) and reduction (``mean``, ``sum`` or ``none``).

    From the loss back to the model's output: where every path passes a loss function of one kind, that is the kind
    (the mean of two cross-entropies is cross-entropy); anything else is ``custom``.
    """
    if loss is None:
        return "custom", "mean"
    kinds: set[str] = set()
    reductions: list[str] = []
    waiting, seen = [loss], set()
    while waiting:
        position = waiting.pop()
        if position in seen:
            continue
        seen.add(position)
        draft = drafts[position]
        if is_loss(draft.name):
            is_log_softmax = any(drafts[source].name == "log_softmax" for source in draft.inputs)
            kind = function_of(draft.name).loss
            kinds.add("cross_entropy" if kind == "nll" and is_log_softmax else kind)
            reductions.append(draft.reduction)
        elif draft.in_loss and draft.kind != "input":
            if draft.name in ("mean", "sum"):
                reductions.append(draft.name)
            waiting.extend(draft.inputs)
        else:
            kinds.add("custom")
    known = [reduction for reduction in dict.fromkeys(reductions) if reduction != "none"]
    return (kinds.pop() if len(kinds) == 1 else "custom"), (known[0] if known else "none")
