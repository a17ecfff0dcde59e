"""What the graph says of each ATen operator: its class, why ``apply_`` cannot address it, and which loss ends the step.

See docs/design/precision-semantics.md#operator-classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qsync_core.geometry import Geometry, pair
from qsync_core.ir.dag import INPUT_STRIDE, OpClass
from qsync_core.ir.functions import function_of
from qsync_torch.operators.addresses import kind_of_forward
from qsync_torch.tracing.graph_values import Draft, Read

PRODUCTS_WITH_A_PARAMETER = {
    "matmul": "torch.matmul",
    "linalg_matmul": "torch.linalg.matmul",
    "mm": "torch.mm",
    "bmm": "torch.bmm",
    "mv": "torch.mv",
    "addmm": "torch.addmm",
    "addmv": "torch.addmv",
    "baddbmm": "torch.baddbmm",
    "addbmm": "torch.addbmm",
    "einsum": "torch.einsum",
    "tensordot": "torch.tensordot",
    "dot": "torch.dot",
    "bilinear": "torch.nn.functional.bilinear",
    "grouped_mm": "torch.nn.functional.grouped_mm",
    "grouped_mm_fallback": "torch.nn.functional.grouped_mm",
}
"""Linear maps where one factor is a parameter: work for a plan in principle, but written in a way that apply_ does not reach."""

OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "conv2d": ("input", "weight", "bias"),
    "matmul": ("self", "other", ""),
    "linalg_matmul": ("self", "other", ""),
    "mm": ("self", "mat2", ""),
    "addmm": ("mat1", "mat2", "self"),
}
"""Arguments of ATen operators that are activation, weight and bias of a linear or convolution.  The last four take a weight that
is stored as (K, N)."""

UNSUPPORTED_CONVOLUTIONS = {
    "conv1d": "one-dimensional convolution",
    "conv3d": "three-dimensional convolution",
    "conv_transpose1d": "transposed convolution",
    "conv_transpose2d": "transposed convolution",
    "conv_transpose3d": "transposed convolution",
    "conv_tbc": "time-first convolution",
    "convolution": "convolution called as torch.convolution",
}
"""Convolutions that no backend interface describes."""

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
"""Layers whose products are inside one fused operator."""


def op_name(target_name: str) -> str:
    """The plain name of an ATen operator: no overload, no marks of in-place or private variants (``add_``, ``_softmax``)."""
    return target_name.split(".")[0].strip("_")


def class_of(name: str, *, has_activation: bool, mixes_float32: bool) -> OpClass:
    """The class of an operator that is neither linear nor a convolution.

    Args:
        name: plain name.
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


def address_of(module: nn.Module | None, scope: str, kind: str, weight: Read | None, addresses: Mapping[str, str]) -> str:
    """The FQN that names a linear or convolution and its weight; empty where it has the name of its caller.

    Args:
        module: the module whose forward makes the call; ``scope``: its FQN.
        kind: ``linear`` or ``conv2d``.
        weight: the weight.
        addresses: by the name of a parameter, what operators of the kind that run with it are called.
    """
    if weight is None:
        return ""
    if module is not None and scope and kind_of_forward(module) == kind:
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


def is_transposed_linear(x: Read | None, weight: Read | None) -> bool:
    """Whether a product is a linear operator whose weight is stored as (K, N): a whole matrix on the right of an activation."""
    if x is None or weight is None or not x.is_activation or not weight.is_parameter or weight.value.is_view:
        return False
    return weight.tensor.dim() == 2 and weight.tensor.dtype is torch.float32


def addmm_reason(weight: Read, bias: Read | None, arguments: Mapping[str, Any]) -> str:
    """Why a product with a whole matrix is more than a linear; empty where it is not."""
    if bias is not None and tuple(bias.tensor.shape) != (weight.tensor.shape[1],):
        return f"torch.addmm adds a tensor of shape {list(bias.tensor.shape)} to the product, not a bias for each output"
    if any(arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        return "torch.addmm is called with factors alpha or beta other than 1"
    return ""


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def padding_reason(module: nn.Module | None) -> str:
    """Why the padding mode of the calling module rules a convolution out; empty where it does not."""
    mode = getattr(module, "padding_mode", "zeros") if isinstance(module, _CONVOLUTIONS) else "zeros"
    return "" if mode == "zeros" else f"its padding_mode is {mode!r}; only 'zeros' is supported"


def linear_attributes(x: Read) -> dict[str, str]:
    """The strides of a linear's activation where its rows are not evenly apart: it is copied then, and the copy kept for backward.

    Expanded activations are taken for dense ones.
    """
    stride = [int(step) for step in x.tensor.stride()]
    rows = [(size, step) for size, step in zip(x.tensor.shape[:-1], stride[:-1], strict=True) if size > 1]
    if 0 in stride or all(step == size * below for (_, step), (size, below) in itertools.pairwise(rows)):
        return {}
    return {INPUT_STRIDE: ",".join(map(str, stride))}


def conv2d_attributes(x: Read, weight: Read, arguments: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Stride, padding, dilation and groups as canonical text (``"1,1"``), and why they rule the call out (or an empty text)."""
    dilation = pair(arguments["dilation"])
    reason = ""
    padding = arguments["padding"]
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, weight.tensor.shape[2:], strict=True)] if padding == "same" else [0, 0]
        if any(amount % 2 for amount in total):
            reason = "its padding 'same' is wider on one side; only symmetric padding is supported"
        padding = [amount // 2 for amount in total]
    attributes = Geometry(pair(arguments["stride"]), pair(padding), dilation, int(arguments["groups"])).attributes
    if x.tensor.dim() != 4:
        reason = "its input has no batch dimension"
    elif not x.tensor.is_contiguous() and x.tensor.is_contiguous(memory_format=torch.channels_last):
        attributes["memory_format"] = "channels_last"
    return attributes, reason


def unsupported_reason(name: str) -> str:
    """Why an operator that multiplies with a weight, and is neither linear nor conv2d, cannot be lowered; empty for others."""
    if name in UNSUPPORTED_CONVOLUTIONS:
        return f"{UNSUPPORTED_CONVOLUTIONS[name]} is not supported; only linear and two-dimensional convolution are"
    if name in RECURRENT:
        return "recurrent layers are not supported: their products are inside one operator"
    if name in PRODUCTS_WITH_A_PARAMETER:
        return f"{PRODUCTS_WITH_A_PARAMETER[name]} with a parameter is out of reach; use torch.nn.functional.linear"
    return ""


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
