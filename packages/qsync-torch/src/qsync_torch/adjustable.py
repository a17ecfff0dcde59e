"""Linear and convolution calls: what their kernels need to know, and why ``apply_`` can not address some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qsync_torch.classify import LINEAR, PRODUCTS_WITH_A_PARAMETER, RECURRENT, UNSUPPORTED_CONVOLUTIONS
from qsync_torch.graph_values import Read


def is_own_call(module: nn.Module | None, kind: str, weight: Read | None, parameter_names: dict[int, str]) -> bool:
    """True where the call is the forward of that very ``nn.Linear`` or ``nn.Conv2d``: the operator is named after the module.

    A subclass that keeps the forward counts; one that overrides it makes functional calls.
    """
    if module is None or weight is None or "forward" in vars(module):
        return False
    if kind == LINEAR:
        own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    else:
        own = (
            isinstance(module, nn.Conv2d)
            and type(module).forward is nn.Conv2d.forward
            and type(module)._conv_forward is nn.Conv2d._conv_forward
        )
    return own and parameter_names.get(id(module._parameters.get("weight"))) == weight.value.storage.name


def weight_reason(weight: Read | None, bias: Read | None) -> str:
    """Why the weight or bias of a call rules it out; empty where they do not."""
    if weight is None:
        return "its weight is not a floating-point tensor"
    storage = weight.value.storage
    if storage.writer is not None and storage.weight_only:
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


def module_reason(module: nn.Module | None) -> str:
    """Why the calling module rules a convolution out; empty where it does not."""
    mode = getattr(module, "padding_mode", "zeros") if isinstance(module, nn.modules.conv._ConvNd) else "zeros"
    return "" if mode == "zeros" else f"its padding_mode is {mode!r}; only 'zeros' is supported"


def conv2d_attributes(x: Read, weight: Read, arguments: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Stride, padding, dilation and groups as canonical text (``"1,1"``), and why they rule the call out (or an empty text)."""
    stride, dilation = _pair(arguments["stride"]), _pair(arguments["dilation"])
    reason = ""
    padding = arguments["padding"]
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, weight.tensor.shape[2:], strict=True)] if padding == "same" else [0, 0]
        if any(amount % 2 for amount in total):
            reason = "its padding 'same' is wider on one side; only symmetric padding is supported"
        padding = [amount // 2 for amount in total]
    attributes = {
        "stride": _text(stride),
        "padding": _text(_pair(padding)),
        "dilation": _text(dilation),
        "groups": str(int(arguments["groups"])),
    }
    if x.tensor.dim() != 4:
        reason = "its input has no batch dimension"
    elif not x.tensor.is_contiguous() and x.tensor.is_contiguous(memory_format=torch.channels_last):
        attributes["memory_format"] = "channels_last"
    return attributes, reason


def unsupported_reason(name: str) -> str:
    """Why an operator that multiplies with a weight in another way than linear and conv2d can not be lowered; empty for others."""
    if name in UNSUPPORTED_CONVOLUTIONS:
        return f"{UNSUPPORTED_CONVOLUTIONS[name]} is not supported; only linear and two-dimensional convolution are"
    if name in RECURRENT:
        return "recurrent layers are not supported: their products are inside one operator"
    if name in PRODUCTS_WITH_A_PARAMETER:
        return f"{PRODUCTS_WITH_A_PARAMETER[name]} with a parameter is out of reach; use torch.nn.functional.linear"
    return ""


def _pair(value: Any) -> list[int]:
    values = [int(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return values * 2 if len(values) == 1 else values


def _text(values: list[int]) -> str:
    return ",".join(map(str, values))
