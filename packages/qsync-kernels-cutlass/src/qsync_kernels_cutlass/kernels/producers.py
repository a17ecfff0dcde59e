"""Front-end of the producers: torch tensors checked once for each layout, and one call of the compiled library.

Operands come in the order of docs/design/fused-chains.md.  Inputs of any strides are copied where they are not dense; outputs are
dense, channels-last for a batch norm.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_core.kernels.support import BATCH_NORMS
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.compiling import library
from qsync_kernels_cutlass.compiling.compile import compiled
from qsync_kernels_cutlass.kernels.operands import FORMATS, current_stream, sm_count
from qsync_kernels_cutlass.sources import producer_source

Tensor = torch.Tensor
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FRESH = library.ProducerArguments.from_buffer_copy
_MOST_REMEMBERED = 1024
"""Layouts of calls; a job with more starts to remember anew."""


class _Kind(enum.Enum):
    """What an operand is."""

    FLOATS = enum.auto()
    SAVED = enum.auto()
    """Floats, or int8."""
    COPY = enum.auto()
    """int8."""
    COLUMNS = enum.auto()
    GROUPS = enum.auto()
    """One entry for whatever is normalized by itself: for each column of a batch norm, for each row of the others."""
    SCALES = enum.auto()
    """One, or one for each row."""
    ONE = enum.auto()
    STREAM = enum.auto()
    """One int64."""
    BITS = enum.auto()
    NUMBER = enum.auto()
    OFFSET = enum.auto()


@attrs.frozen
class _Operand:
    """One argument of a kernel.

    Attributes:
        field: of :class:`ProducerArguments`.
        written: an output.
        needed: never None.
        name: in error messages.
    """

    field: str
    kind: _Kind
    written: bool = False
    needed: bool = False
    name: str = ""

    @property
    def format_field(self) -> str:
        """Where the format of a tensor is said; empty where it has no choice."""
        shared = {"grad_residual": "grad_input"}.get(self.field, self.field)
        return f"{shared}_format" if self.kind in (_Kind.FLOATS, _Kind.SAVED) else ""


def _read(field: str, kind: _Kind, needed: bool = False, name: str = "") -> _Operand:
    return _Operand(field, kind, needed=needed, name=name or field)


def _out(field: str, kind: _Kind, needed: bool = False, name: str = "") -> _Operand:
    return _Operand(field, kind, True, needed, name or f"{field}_out")


_EPS, _SEED, _X_SEED = (_read(name, _Kind.NUMBER, True) for name in ("eps", "seed", "x_seed"))
_OFFSET = _read("offset", _Kind.OFFSET, True)
_WEIGHT, _BIAS = _read("weight", _Kind.COLUMNS), _read("bias", _Kind.COLUMNS)
_RESULT = _out("out", _Kind.FLOATS, name="out")
_COPY = (
    *(_out("q", _Kind.COPY), _out("scale", _Kind.SCALES)),
    _out("stream_out", _Kind.STREAM, name="stream_out"),
)
_X_COPY = (_out("x_q", _Kind.COPY), _out("x_scale", _Kind.GROUPS))
_STREAMS = (_SEED, _X_SEED, _OFFSET)
_SAVED = (_read("grad", _Kind.FLOATS, True), _read("x", _Kind.SAVED, True), _read("x_scale", _Kind.GROUPS))
_GRAD_PARAMETERS = (_out("grad_weight", _Kind.COLUMNS), _out("grad_bias", _Kind.COLUMNS))

_GRAD_COPY = (
    *(
        _read("multiplier", _Kind.COLUMNS),
        _out("q", _Kind.COPY, name="grad_q_out"),
        _out("scale", _Kind.ONE, name="grad_scale_out"),
    ),
    *(_SEED, _OFFSET),
)
OPERANDS: dict[str, tuple[_Operand, ...]] = {
    Op.BATCH_NORM_OUTPUT: (
        *(_read("x", _Kind.FLOATS, True), _WEIGHT, _BIAS, _EPS, _read("residual", _Kind.FLOATS)),
        *(_read("residual_absmax", _Kind.ONE), _out("mean", _Kind.GROUPS, True), _out("spread", _Kind.GROUPS, True, "var_out")),
        *(_RESULT, _out("absmax", _Kind.ONE), *_COPY, *_X_COPY, _out("open", _Kind.BITS), *_STREAMS),
    ),
    Op.BATCH_NORM_GRAD_INPUT: (
        *(*_SAVED, _read("mean", _Kind.GROUPS, True), _read("spread", _Kind.GROUPS, True, "var"), _WEIGHT, _BIAS, _EPS),
        *(_read("open", _Kind.BITS), _out("grad_input", _Kind.FLOATS), _out("grad_residual", _Kind.FLOATS), *_GRAD_PARAMETERS),
    ),
    Op.LAYER_NORM_OUTPUT: (
        *(_read("x", _Kind.FLOATS, True), _WEIGHT, _BIAS, _EPS, _read("residual", _Kind.FLOATS)),
        *(_out("kept", _Kind.FLOATS, name="sum_out"), _out("mean", _Kind.GROUPS, True)),
        *(_out("spread", _Kind.GROUPS, True, "rstd_out"), _RESULT, *_COPY, *_X_COPY, *_STREAMS),
    ),
    Op.LAYER_NORM_GRAD_INPUT: (
        *(*_SAVED, _read("mean", _Kind.GROUPS, True), _read("spread", _Kind.GROUPS, True, "rstd"), _WEIGHT),
        *(_out("grad_input", _Kind.FLOATS), *_GRAD_PARAMETERS),
    ),
    Op.ACTIVATION_OUTPUT: (_read("x", _Kind.FLOATS, True), _RESULT, *_COPY, *_X_COPY, *_STREAMS),
    Op.ACTIVATION_GRAD_INPUT: (*_SAVED, _out("grad_input", _Kind.FLOATS, True)),
}
"""Arguments of every producer, in order."""


def operands_of(request: KernelRequest) -> tuple[_Operand, ...]:
    """The arguments that a request's kernel takes."""
    return OPERANDS[request.op] + (_GRAD_COPY if request.chain.grad_copy else ())


@attrs.frozen(eq=False)
class _Plan:
    """What calls with operands of the same formats and layouts share.

    Attributes:
        arguments: sizes and formats.
        tensors: place, field, and how they lie dense in memory.
        workspace: bytes.
    """

    arguments: library.ProducerArguments
    tensors: tuple[tuple[int, str, torch.memory_format], ...]
    workspace: int


class Producer:
    """A compiled producer.  Calling it launches work on the current stream and waits for nothing."""

    def __init__(self, request: KernelRequest, arch: Architecture) -> None:
        """Compile or load the kernel.

        Args:
            request: one that the backend supports.
            arch: chip to compile for.

        Raises:
            BackendError: when it cannot be compiled or loaded.
        """
        self._op, self._operands = request.op, operands_of(request)
        self._library = compiled(producer_source(request, arch))
        self._is_image = request.op in BATCH_NORMS
        self._is_relu = request.chain.activation is Activation.RELU
        self._has_residual = request.chain.residual
        by_row = request.variant.x_granularity is Granularity.PER_ROW
        self._rounding, self._by_row = library.PRODUCER_ROUNDING[str(request.variant.rounding)], by_row and not self._is_image
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def __call__(self, *given: Any) -> None:
        """Run on the operands of docs/design/fused-chains.md.

        Raises:
            BackendError: for operands of other formats, shapes, layouts or devices, and when the kernel fails.
        """
        x = given[1 if self._op.endswith(".grad_input") else 0]
        if x.numel() == 0:
            self._check(x, given)
            self._fill(given)
            return
        key = tuple([(t.dtype, t.shape, t.stride(), t.device) if isinstance(t, Tensor) else type(t) for t in given])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_REMEMBERED:
                self._plans.clear()
            plan = self._plans[key] = self._planned(x, given)
        q = _FRESH(plan.arguments)
        dense: list[Tensor] = []  # copies live until the launch
        for place, field, layout in plan.tensors:
            dense.append(given[place].contiguous(memory_format=layout))
            setattr(q, field, dense[-1].data_ptr())
        for operand, value in zip(self._operands, given, strict=True):
            if operand.kind is _Kind.NUMBER or (operand.kind is _Kind.OFFSET and not isinstance(value, Tensor)):
                setattr(q, operand.field, value)
        if plan.workspace:
            workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=x.device)
            q.workspace, q.workspace_bytes = workspace.data_ptr(), plan.workspace
        q.stream = current_stream(q.device)
        self._library.call(q, lambda: self._described(x))

    def _described(self, x: Tensor) -> str:
        return library.describe_call(self._op, (x.shape,), FORMATS[x.dtype])

    def _planned(self, x: Tensor, given: tuple[Any, ...]) -> _Plan:
        self._check(x, given)
        columns = x.shape[1]
        device = x.get_device()
        numbers = {"rows": x.numel() // columns, "columns": columns, "device": device, "sm_count": sm_count(device)}
        tensors = []
        for place, (operand, value) in enumerate(zip(self._operands, given, strict=True)):
            if not isinstance(value, Tensor):
                continue
            field = "offset_tensor" if operand.kind is _Kind.OFFSET else operand.field
            tensors.append((place, field, self._layout(operand, value)))
            if operand.format_field:
                numbers[operand.format_field] = library.PRODUCER_FORMATS[FORMATS[value.dtype]]
        arguments = library.ProducerArguments(rounding=self._rounding, scale_per_row=int(self._by_row), **numbers)
        for place, field, _ in tensors:  # workspace depends on what is wanted
            setattr(arguments, field, given[place].data_ptr())
        return _Plan(arguments, tuple(tensors), self._library.workspace_bytes(arguments, lambda: self._described(x)))

    def _check(self, x: Tensor, given: tuple[Any, ...]) -> None:
        if problems := "; ".join(self._problems(x, given)):
            raise BackendError(f"backend cutlass cannot run {self._op}: {problems}")

    def _problems(self, x: Tensor, given: tuple[Any, ...]) -> Iterator[str]:
        """What is wrong with the operands, each half a sentence."""
        if x.ndim != (4 if self._is_image else 2):
            yield f"x must be {'(B, C, H, W)' if self._is_image else 'a matrix'}, got shape {tuple(x.shape)}"
            return
        by_field = dict(zip((operand.field for operand in self._operands), given, strict=True))
        for operand, value in zip(self._operands, given, strict=True):
            if value is None and operand.needed:
                yield f"{operand.name} is needed, got None"
            elif isinstance(value, Tensor):
                yield from self._tensor_problems(operand, value, x)
        for copy, scale in (("q", "scale"), ("x_q", "x_scale")):
            if copy in by_field and (by_field[copy] is None) != (by_field[scale] is None):
                yield f"{copy}_out and {scale}_out come together, and one of them is None"
        yield from self._residual_problems(by_field, x)

    def _residual_problems(self, by_field: dict[str, Any], x: Tensor) -> Iterator[str]:
        if self._op == Op.BATCH_NORM_OUTPUT:
            if by_field["residual"] is not None and by_field["q"] is not None and by_field["residual_absmax"] is None:
                yield "residual_absmax is needed beside a residual: without it no scale is known to hold the result"
        elif self._op.endswith(".grad_input"):
            eight_bit = x.dtype is torch.int8
            if eight_bit != (by_field["x_scale"] is not None):
                yield f"x_scale goes with an x of 8 bit and with no other, and x is {x.dtype}"
            needs_bits = self._op == Op.BATCH_NORM_GRAD_INPUT and self._is_relu and (self._has_residual or eight_bit)
            if needs_bits and by_field["open"] is None:
                yield "open is needed for a ReLU behind a residual, or of an 8-bit x: z cannot be worked out from x alone"
        if by_field.get("grad_input") is not None and by_field.get("grad_residual") is not None:
            formats = by_field["grad_input"].dtype, by_field["grad_residual"].dtype
            if formats[0] is not formats[1]:
                yield f"grad_input_out and grad_residual_out have one format, got {formats[0]} and {formats[1]}"

    def _tensor_problems(self, operand: _Operand, value: Tensor, x: Tensor) -> Iterator[str]:
        columns = x.shape[1] if x.ndim > 1 else 0
        rows = x.shape[0] if not self._is_image else x.shape[0] * x.shape[2] * x.shape[3]
        dtypes: tuple[torch.dtype, ...] = (torch.float32,)
        shape: tuple[int, ...] | None = None
        count = columns
        if operand.kind in (_Kind.FLOATS, _Kind.SAVED, _Kind.COPY):
            shape = tuple(x.shape)
            floats = () if operand.kind is _Kind.COPY else _FLOATS
            dtypes = floats if operand.kind is _Kind.FLOATS else (*floats, torch.int8)
        elif operand.kind is _Kind.BITS:
            shape, dtypes = (x.shape[0], *x.shape[2:], -(-columns // 8)), (torch.uint8,)
        elif operand.kind in (_Kind.OFFSET, _Kind.STREAM):
            count, dtypes = 1, (torch.int64,)
        elif operand.kind is _Kind.ONE or (operand.kind is _Kind.SCALES and not self._by_row):
            count = 1
        elif operand.kind is _Kind.SCALES or (operand.kind is _Kind.GROUPS and not self._is_image):
            count = rows
        said = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wrong = value.numel() != count if shape is None else tuple(value.shape) != shape
        if value.dtype not in dtypes or wrong:
            expected = f"{count} {said}" if shape is None else f"{said} of shape {shape}"
            yield f"{operand.name} must be {expected}, got {value.dtype} {tuple(value.shape)}"
        if value.device != x.device:
            yield f"{operand.name} is on {value.device}, and x on {x.device}"
        layout = self._layout(operand, value)
        if operand.written and not value.is_contiguous(memory_format=layout):
            dense = "channels-last" if layout is torch.channels_last else "contiguous"
            yield f"{operand.name} must be {dense}, and has shape {tuple(value.shape)} with strides {value.stride()}"

    def _layout(self, operand: _Operand, value: Tensor) -> torch.memory_format:
        is_image = self._is_image and value.ndim == 4 and operand.kind is not _Kind.BITS
        return torch.channels_last if is_image else torch.contiguous_format

    def _fill(self, given: tuple[Any, ...]) -> None:
        """Outputs of nothing: statistics and gradients of parameters are 0, scales 1, the stream is the offset."""
        by_field = dict(zip((operand.field for operand in self._operands), given, strict=True))
        for operand, value in zip(self._operands, given, strict=True):
            if operand.kind is _Kind.STREAM and isinstance(value, Tensor):
                offset = by_field["offset"]
                _ = value.copy_(offset) if isinstance(offset, Tensor) else value.fill_(offset)
            elif isinstance(value, Tensor) and operand.written:
                value.fill_(1.0 if operand.field in ("scale", "x_scale") else 0.0)
        if self._op == Op.LAYER_NORM_OUTPUT:
            by_field["spread"].fill_(1 / math.sqrt(by_field["eps"]))
