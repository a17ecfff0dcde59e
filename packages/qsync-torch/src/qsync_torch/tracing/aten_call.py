"""An operator's ATen call as text, so that it can be run again without the model.

Dependent, guarded and fixed operators (and those that ``apply_`` cannot address) carry their call in
``Operator.attributes["call"]``: canonical JSON of the overload and its arguments.  ``profile`` runs it to measure them.

Arguments stand for themselves, except::

    {"input": i, "stride": [...]}          the i-th activation; strides in elements where it is not contiguous
    {"parameter": j, "shape": [...]}       the j-th parameter, or all of it in another shape
    {..., "complex": true}                 either of them, of complex numbers; the shape's last dimension is their two parts
    {"tensor": [...], "dtype": "int64", "below": n}  any other tensor; integers lie in 0..n-1
    {"tensor": [...], "dtype": "bool", "expanded": true}  whose last dimension has stride 0; made dense; not with "dense": false
    {"tensor": [...], "dtype": "int64", "offsets": n, "first": f}  rows at which equal parts of n begin (f = 0) or end (f = 1)
    {"dtype": "bool"}, {"device": ""}, {"layout": "strided"}, {"memory_format": "channels_last"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.ir.dag import Operator
from qsync_torch.operators.norms import call_norm

_NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": torch.layer_norm,
    "group_norm": torch.group_norm,
    "rms_norm": torch.rms_norm,
}
"""Run as ``apply_`` runs them: on 16-bit activations their float32 parameters may need a cast."""

_MATRIX_OPERATORS = ("linalg_", "cholesky", "inverse", "logdet", "slogdet", "det")
"""Operators that may fail on any matrix."""

CALL_ATTRIBUTE = "call"
"""Key of ``Operator.attributes``."""


def encode_call(
    target: torch.fx.node.Target, args: Sequence[Any], kwargs: Mapping[str, Any], describe: Callable[[Any], Any]
) -> str:
    """The text of a call.  ``describe`` gives the dictionary that stands for a graph node."""

    def encode(value: Any) -> Any:
        match value:
            case torch.fx.Node():
                return describe(value)
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                return [encode(item) for item in value]
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": ""}
            case torch.layout():
                return {"layout": str(value).removeprefix("torch.")}
            case torch.memory_format():
                return {"memory_format": str(value).removeprefix("torch.")}
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return encode(value.node.hint)
        return {"opaque": type(value).__name__}

    return json.dumps(
        {"op": str(target), "args": encode(list(args)), "kwargs": {key: encode(value) for key, value in sorted(kwargs.items())}},
        separators=(",", ":"),
    )


@attrs.frozen
class AtenCall:
    """A call that can be run: ``AtenCall.of(operator).bind(inputs, parameters)()``.

    Attributes:
        op: ``aten.add.Tensor`` and so on; another library's operator begins with its namespace.
    """

    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    operator: Operator

    @classmethod
    def of(cls, operator: Operator) -> AtenCall | None:
        """The operator's call; None where it carries none that can be run (graph inputs, higher-order and unknown operators)."""
        text = operator.attributes.get(CALL_ATTRIBUTE)
        if text is None or '"opaque"' in text:
            return None
        call = json.loads(text)
        if not _is_registered(call["op"]):
            return None
        return cls(call["op"], call["args"], call["kwargs"], operator)

    def _specs(self, key: str) -> Iterator[dict[str, Any]]:
        """The dictionaries that stand for activations or parameters, in the order of the arguments."""
        waiting = [*self.args, *self.kwargs.values()][::-1]
        while waiting:
            match waiting.pop():
                case list() as items:
                    waiting.extend(reversed(items))
                case dict() as spec if key in spec:
                    yield spec

    def make_inputs(self, dtypes: Sequence[torch.dtype], device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Random activations of the operator's shapes and memory layouts; where the call says a format of its own, in that."""
        strides: dict[int, list[int]] = {}
        for spec in self._specs("input"):
            strides.setdefault(spec["input"], spec.get("stride", []))
        own = {spec["input"]: getattr(torch, spec["held"]) for spec in self._specs("input") if "held" in spec}
        dtypes = [own.get(index, dtype) for index, dtype in enumerate(dtypes)]
        inputs = []
        for index, (shape, dtype) in enumerate(zip(self.operator.input_shapes, dtypes, strict=True)):
            stride = strides.get(index)
            if stride and 0 not in stride:  # expanded activations are made dense
                made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            else:
                made = torch.empty(shape, dtype=dtype, device=device)
            inputs.append(made.normal_())
        if self.op.split(".")[1].lstrip("_").startswith(_MATRIX_OPERATORS):
            for made in inputs:
                if made.dim() > 1 and made.shape[-1] == made.shape[-2]:
                    made.diagonal(dim1=-2, dim2=-1).add_(
                        3 * made.shape[-1]
                    )  # invertible, and positive definite as far as it is read
        return inputs

    def make_parameters(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Random parameters, in the order of ``Operator.parameters``: float32, or as the script holds them."""
        found = {
            spec["parameter"]: (spec["shape"], getattr(torch, spec.get("held", "float32"))) for spec in self._specs("parameter")
        }
        count = len(self.operator.parameters)
        each = (found.get(index, ((), torch.float32)) for index in range(count))
        return [torch.randn(shape, device=device).to(dtype) for shape, dtype in each]

    def bind(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor] = (),
        device: torch.device | str = "cpu",
        *,
        as_apply_runs_it: bool = True,
    ) -> Callable[[], Any]:
        """A function that only makes the call: everything around it (arguments, other tensors) is made here, once.

        In-place operators run as their functional form, so that leaves of the autograd graph may be given.  Norms run as ``apply_``
        runs them unless the caller says otherwise, who then runs them under autocast.  Numbers beyond the range of the inputs'
        format (masks of attention scores) are the largest that it has.
        """
        largest = min((torch.finfo(x.dtype).max for x in inputs if x.is_floating_point()), default=math.inf)

        def decode(value: Any) -> Any:
            match value:
                case list():
                    return [decode(item) for item in value]
                case {"input": index}:
                    return torch.view_as_complex(inputs[index]) if "complex" in value else inputs[index]
                case {"parameter": index}:
                    return torch.view_as_complex(parameters[index]) if "complex" in value else parameters[index]
                case {"tensor": [count], "dtype": dtype, "offsets": rows, "first": first}:
                    ends = [(part + first) * rows // count for part in range(count)]
                    return torch.tensor(ends, dtype=getattr(torch, dtype), device=device)
                case {"tensor": shape, "dtype": dtype}:
                    made = _make_tensor(shape, getattr(torch, dtype), value.get("below", 1), device)
                    return made[..., :1].expand(shape) if "expanded" in value and "dense" in value else made
                case {"dtype": name} | {"layout": name} | {"memory_format": name}:
                    return getattr(torch, name)
                case {"device": _}:
                    return torch.device(device)
                case float() if math.isfinite(value):
                    return max(-largest, min(value, largest))
            return value

        args, kwargs = decode(self.args), {key: decode(value) for key, value in self.kwargs.items()}
        namespace, packet_name, overload = self.op.split(".")
        packet = getattr(getattr(torch.ops, namespace), packet_name)
        if "out" in kwargs:  # autograd refuses these, so a model calls them without it
            return torch.no_grad()(partial(getattr(packet, overload), *args, **kwargs))
        if packet_name.endswith("_") and not packet_name.startswith("_"):
            functional = getattr(getattr(torch.ops, namespace), packet_name[:-1], None)
            if functional is not None and overload in functional.overloads():
                packet = functional
            else:
                call = getattr(packet, overload)
                return lambda: call(args[0].clone(), *args[1:], **kwargs)
        if packet_name in _NORMS and as_apply_runs_it:
            return partial(call_norm, _NORMS[packet_name], tuple(args), kwargs)
        return partial(getattr(packet, overload), *args, **kwargs)


def _is_registered(op: str) -> bool:
    """Whether it names an ATen operator, or another library's that was imported."""
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    return hasattr(getattr(getattr(torch.ops, namespace), packet, None), overload) if overload else False


def _make_tensor(shape: list[int], dtype: torch.dtype, below: int, device: torch.device | str) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randint(below, shape, dtype=dtype, device=device)
