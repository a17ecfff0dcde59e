"""What PyTorch does otherwise on CUDA than on the device without memory on which a step is drawn (docs/fits.md#how).

Autocast has no such device, attention takes a fused kernel, dropout keeps a mask of a byte an element.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from qsync_core.ir.functions import UnderAutocast, function_of
from qsync_core.kinds import KINDS, kind_of
from qsync_torch.torch_internals import pytree

_MOST_HEAD = 256
"""Elements of a head in fused attention."""
_FUSED = {operator.__name__: operator for operator in flop_registry}
"""Operators whose operations PyTorch counts, fused attention among them."""
_OTHER_NAMES = {"cross_entropy": "cross_entropy_loss", "multi_head_attention_forward": kind_of(None).name}
"""Functions of ``torch.nn.functional`` by the name of the row that tells their format."""


class AsOnCuda(TorchFunctionMode):
    """Runs functions as CUDA does, in the formats of autocast or of a plan.

    Args:
        base: what autocast casts to; None without autocast.
        lowered: what a plan of one format lowers linear layers and convolutions to; None without a plan.
    """

    def __init__(self, base: torch.dtype | None = None, lowered: torch.dtype | None = None) -> None:
        super().__init__()
        self._base, self._lowered = base, lowered
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shared: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        args, kwargs = self._in_format(_OTHER_NAMES.get(name, name), tuple(args), dict(kwargs or {}))
        if name == "scaled_dot_product_attention":
            return _attention(func, *args, **kwargs)
        if name == "dropout" and func is nn.functional.dropout:
            return _dropout(func, *args, **kwargs)
        return func(*args, **kwargs)

    def forget_casts(self) -> None:
        """Free the copies of weights, as leaving autocast does."""
        self._weights.clear()
        self._shared.clear()

    def _in_format(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's operands in the format in which it runs."""
        if self._lowered is not None and name in KINDS:
            args, kwargs = pytree.tree_map(self._shared_cast, (args, kwargs))
            return args, kwargs
        if self._base is None:
            if self._lowered is not None and function_of(name).loss:
                return self._cast(torch.float32, False, args, kwargs)
            return self._widest(name, args, kwargs) if self._lowered is not None else (args, kwargs)
        autocast, loss = function_of(name).autocast, function_of(name).loss
        if autocast is UnderAutocast.BASE:
            return self._cast(self._base, True, args, kwargs)
        if autocast is UnderAutocast.FLOAT32_ON_CUDA or loss:
            return self._cast(torch.float32, False, args, kwargs)
        return self._widest(name, args, kwargs)

    def _widest(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Products, and norms of which CUDA takes one format, in the widest that arrives."""
        if not function_of(name).is_product and name != "layer_norm":
            return args, kwargs
        leaves = pytree.tree_leaves((args, kwargs))
        formats = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}
        if len(formats) < 2:
            return args, kwargs
        if name == "layer_norm" and self._lowered is not None:
            return self._cast(args[0].dtype, False, args, kwargs)
        return self._cast(torch.float32, False, args, kwargs)

    def _shared_cast(self, leaf: Any) -> Any:
        """A plan's cast, which all that read a tensor share while one of them keeps it."""
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype is self._lowered:
            return leaf
        read, cast = self._shared.get(id(leaf), (None, None))
        found = cast() if cast is not None and read is not None and read() is leaf else None
        if found is None:
            found = leaf.to(self._lowered)
            self._shared[id(leaf)] = weakref.ref(leaf), weakref.ref(found)
        return found

    def _cast(self, dtype: torch.dtype, keep: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype in (dtype, torch.float64):
                return leaf
            if not (keep and leaf.is_leaf and leaf.requires_grad):
                return leaf.to(dtype)
            if id(leaf) not in self._weights:
                self._weights[id(leaf)] = (leaf, leaf.to(dtype))
            return self._weights[id(leaf)][1]

        found: tuple[Any, Any] = pytree.tree_map(cast, (args, kwargs))
        return found


def _attention(
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Fused attention: its result and a sum for each row are kept, no scores."""
    if query.dim() != 4 or max(query.shape[-1], value.shape[-1]) > _MOST_HEAD or query.device.type != "meta":
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return _FUSED["_scaled_dot_product_flash_attention"](query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.device, query.dtype).expand(*query.shape[:3], key.shape[2])
    keep = any(tensor.requires_grad for tensor in (query, key, value))
    attend = _FUSED["_scaled_dot_product_efficient_attention"]
    return attend(query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale)[0]


def _dropout(func: Callable[..., Any], input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """CUDA's kernel draws and keeps a mask of booleans."""
    if not training or not 0 < p < 1 or inplace:
        return func(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def on_meta(model: nn.Module) -> nn.Module:
    """Give a model parameters and buffers without memory, shared ones once; integer buffers keep their values."""
    moved: dict[int, torch.Tensor] = {}

    def of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            empty = torch.empty_like(tensor, device="meta")
            moved[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return moved[id(tensor)]

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, of(parameter))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_floating_point() and buffer.dim():
                setattr(module, name, of(buffer))
            elif buffer.device.type == "meta":
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu"))
    return model


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers."""
    return list(itertools.chain(model.parameters(), model.buffers()))
