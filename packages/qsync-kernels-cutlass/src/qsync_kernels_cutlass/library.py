"""A compiled kernel library: loading it, and turning its statuses into errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import attrs

from qsync_core.errors import BackendError
from qsync_kernels_cutlass import abi
from qsync_kernels_cutlass.kernel_source import KernelSource


@attrs.frozen
class CallContext:
    """What an error message says about the call that failed; formatted only when there is an error.

    Attributes:
        op: operator (``linear.output``).
        shapes: of the operands.
        formats: of the operands and the output (``int8 x int8 -> bfloat16``).
        config: text of the configuration.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    formats: str
    config: str

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(shape)) for shape in self.shapes)
        return f"{self.op} ({self.formats}) of shapes {shapes} with the configuration {self.config}"


class Library:
    """A loaded shared library with the kernel of one :class:`KernelSource`."""

    def __init__(self, path: Path, source: KernelSource) -> None:
        """Load the library (which starts no CUDA).

        Raises:
            BackendError: when it can not be loaded or does not export the source's functions.
        """
        self.path = path
        self.source = source
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"the compiled kernel {path} can not be loaded: {error}") from None
        self._run = self._function(source.symbol, ctypes.c_int32)
        self._workspace = self._function(source.workspace_symbol, ctypes.c_int64)

    def _function(self, symbol: str, result: type[ctypes.c_int32] | type[ctypes.c_int64]) -> Callable[..., int]:
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            raise BackendError(f"the compiled kernel {self.path} does not export {symbol}; clear the kernel cache") from None
        function.restype = result
        function.argtypes = (ctypes.POINTER(abi.Arguments),)
        return function

    def call(self, arguments: abi.Arguments, context: object) -> None:
        """Run the kernel on ``arguments.stream``; it returns when the kernel is launched, not when it has run.

        Args:
            arguments: sizes, pointers and knobs.
            context: what an error names; its text is only asked for when there is an error (:class:`CallContext`).

        Raises:
            BackendError: when the kernel returns an error.
        """
        status = self._run(ctypes.byref(arguments))
        if status != abi.OK:
            raise BackendError(f"{context} failed: {abi.describe_status(status)}")

    def workspace_bytes(self, arguments: abi.Arguments, context: object) -> int:
        """Bytes of workspace that a call with these arguments needs.

        Raises:
            BackendError: when the kernel can not run them at all.
        """
        answer = self._workspace(ctypes.byref(arguments))
        if answer < 0:
            raise BackendError(f"{context} can not run: {abi.describe_status(-answer)}")
        return answer
