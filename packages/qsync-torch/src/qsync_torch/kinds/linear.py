"""The linear operator, ``y = x @ weight.T + bias``: x (..., K), weight (N, K), bias (N,), y (..., N)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.dag import INPUT_STRIDE
from qsync_core.kinds import KINDS
from qsync_torch.kinds.kind import Operands, OperatorKind, Settings, Spelling, TracedCall

_Read = tuple[Any, Any, Settings]


def _linear(args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: torch.Tensor) -> _Read:
    return args[0] if args else kwargs.get("input"), args[2] if len(args) > 2 else kwargs.get("bias"), ()


def _product(args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: torch.Tensor) -> _Read | None:
    """``x @ weight``."""
    return None if "out" in kwargs else (args[0] if args else kwargs.get("input"), None, ())


def _addmm(args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: torch.Tensor) -> _Read | None:
    """``bias + x @ weight``."""
    bias, x = ([*args, *(kwargs.get(name) for name in ("input", "mat1")[len(args) :])])[:2]
    factors = len(args) > 3 or "out" in kwargs or any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    if factors or not isinstance(bias, torch.Tensor) or bias.shape != weight.shape[1:]:
        return None
    return x, bias, ()


def _describe(call: TracedCall) -> tuple[dict[str, str], str]:
    """The strides of an activation whose rows are not evenly apart: it is copied then, and the copy kept for backward.

    Expanded activations are taken for dense ones.  A product with a whole matrix may be more than a linear operator.
    """
    reason = ""
    if call.bias is not None and tuple(call.bias.shape) != (call.weight.shape[1],) and "mat2" in call.arguments:
        reason = f"torch.addmm adds a tensor of shape {list(call.bias.shape)} to the product, not a bias for each output"
    elif any(call.arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        reason = "torch.addmm is called with factors alpha or beta other than 1"
    stride = [int(step) for step in call.x.stride()]
    rows = [(size, step) for size, step in zip(call.x.shape[:-1], stride[:-1], strict=True) if size > 1]
    if 0 in stride or all(step == size * below for (_, step), (size, below) in itertools.pairwise(rows)):
        return {}, reason
    return {INPUT_STRIDE: ",".join(map(str, stride))}, reason


_T = torch.Tensor
_PRODUCTS = {
    torch.matmul: "other",
    torch.mm: "mat2",
    torch.linalg.matmul: "other",
    _T.matmul: "other",
    _T.__matmul__: "other",
    _T.mm: "mat2",
}

LINEAR = OperatorKind(
    row=KINDS["linear"],
    function=F.linear,
    module=nn.Linear,
    methods=("forward",),
    settings={},
    spellings={
        F.linear: Spelling(1, "weight", _linear),
        **{function: Spelling(1, name, _product, transposed=True) for function, name in _PRODUCTS.items()},
        **dict.fromkeys((torch.addmm, _T.addmm), Spelling(2, "mat2", _addmm, transposed=True)),
    },
    aten={
        "linear": Operands(),
        "matmul": Operands("self", "other", "", transposed=True),
        "linalg_matmul": Operands("self", "other", "", transposed=True),
        "mm": Operands("self", "mat2", "", transposed=True),
        "addmm": Operands("mat1", "mat2", "self", transposed=True),
    },
    prepare=None,
    of_module=None,
    describe=_describe,
)
