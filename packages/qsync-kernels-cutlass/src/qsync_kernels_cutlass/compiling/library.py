"""Compiled kernel libraries: the arguments and statuses of ``templates/abi.h`` (a test compares the two), loading, calling."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qsync_core.errors import BackendError
from qsync_core.kernels.launches import HERE
from qsync_kernels_cutlass.sources import KernelSource

OK = 0
MISALIGNED = 1
INVALID_PROBLEM = 2
NOT_SUPPORTED = 3
WORKSPACE_TOO_SMALL = 4
WRONG_ABI = 5
INTERNAL = 6
CUDA_ERROR = 1000

_MEANINGS = {
    MISALIGNED: "a pointer or a row of an operand is not aligned as this kernel needs it",
    INVALID_PROBLEM: "the kernel does not take these sizes or strides",
    NOT_SUPPORTED: "the kernel cannot run these arguments on this device",
    WORKSPACE_TOO_SMALL: "the workspace is missing or too small",
    WRONG_ABI: "the library was compiled for other arguments than this version of qsync-kernels-cutlass passes",
    INTERNAL: "CUTLASS refused without giving a reason",
}

RASTER = {"auto": 0, "m": 1, "n": 2}
"""Run-time raster knob, by the text of :class:`~qsync_kernels_cutlass.configs.config.Raster`."""

_SIZES = ("struct_bytes", "m", "n", "k", "batch", "lda", "ldb", "ldo", "stride_a", "stride_b", "stride_o")
_CONVOLUTION = (
    *("images", "in_h", "in_w", "in_c", "out_h", "out_w", "out_c", "filter_h", "filter_w"),
    *("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "groups"),
)
_POINTERS = ("a", "b", "a_scale", "b_scale", "bias", "out", "workspace")
_COUNTS = ("a_scale_count", "b_scale_count", "workspace_bytes")
_KNOBS = ("device", "sm_count", "raster", "swizzle", "splits")


class Arguments(ctypes.Structure):
    """``QsyncArguments``.  Pointers are device addresses as integers (``tensor.data_ptr()``), None or 0 for none."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_SIZES, *_CONVOLUTION)),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _COUNTS),
        ("stream", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _KNOBS),
    )

    def __init__(self, **fields: int | None) -> None:
        defaults = {"struct_bytes": ctypes.sizeof(type(self)), "batch": 1, "groups": 1, "swizzle": 1, "splits": 1}
        super().__init__(**(defaults | fields))


_DEFAULTS = Arguments()


def fresh_arguments() -> Arguments:
    """Arguments at their defaults, to be filled in: a tenth of the time that the constructor takes."""
    return Arguments.from_buffer_copy(_DEFAULTS)


def describe_status(status: int) -> str:
    """What a status other than 0 means, as half a sentence."""
    if status >= CUDA_ERROR:
        return f"CUDA reported error {status - CUDA_ERROR}"
    return _MEANINGS.get(status, f"the kernel returned the unknown status {status}")


def describe_call(op: str, shapes: Iterable[Sequence[int]], formats: str, config: str = "") -> str:
    """What an error message says about a call: ``linear.output (int8 x int8 -> bfloat16) of shapes (4, 8), (16, 8)``."""
    described = f"{op} ({formats}) of shapes {', '.join(str(tuple(shape)) for shape in shapes)}"
    return f"{described} with the configuration {config}" if config else described


_POINTER_PLACES = tuple(getattr(Arguments, name).offset for name in _POINTERS)
_STREAM_PLACE = Arguments.stream.offset


def _failing(what: str) -> Callable[[int], None]:
    def fails(status: int) -> None:
        raise BackendError(f"{what} failed: {describe_status(status)}")

    return fails


class Library:
    """A loaded shared library with the kernel of one :class:`KernelSource`."""

    def __init__(self, path: Path, source: KernelSource) -> None:
        """Load the library (which starts no CUDA).

        Raises:
            BackendError: when it cannot be loaded or does not export the source's functions.
        """
        self.path = path
        self.source = source
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"the compiled kernel {path} cannot be loaded: {error}") from None
        self._run = self._function(source.symbol, ctypes.c_int32)
        self._workspace = self._function(source.workspace_symbol, ctypes.c_int64)

    def _function(self, symbol: str, result: type[ctypes.c_int32] | type[ctypes.c_int64]) -> Any:
        try:
            function: Any = getattr(self._library, symbol)
        except AttributeError:
            raise BackendError(f"the compiled kernel {self.path} does not export {symbol}; clear the kernel cache") from None
        function.restype = result
        function.argtypes = (ctypes.POINTER(Arguments),)
        return function

    def call(self, arguments: Arguments, describe: Callable[[], str]) -> None:
        """Run the kernel on ``arguments.stream``; it returns when the kernel is launched, not when it has run.

        Args:
            arguments: sizes, pointers and knobs.
            describe: what an error says about the call (:func:`describe_call`); called only when there is one.

        Raises:
            BackendError: when the kernel returns an error.
        """
        status: int = self._run(ctypes.byref(arguments))
        if status != OK:
            raise BackendError(f"{describe()} failed: {describe_status(status)}")
        if HERE.recorder is not None:
            function = ctypes.cast(self._run, ctypes.c_void_p).value
            assert function is not None
            HERE.recorder.called_in_c(function, bytes(arguments), _POINTER_PLACES, _STREAM_PLACE, _failing(describe()))

    def workspace_bytes(self, arguments: Arguments, describe: Callable[[], str]) -> int:
        """Bytes of workspace that a call with these arguments needs.

        Raises:
            BackendError: when the kernel cannot run them at all.
        """
        answer: int = self._workspace(ctypes.byref(arguments))
        if answer < 0:
            raise BackendError(f"{describe()} cannot run: {describe_status(-answer)}")
        return answer
