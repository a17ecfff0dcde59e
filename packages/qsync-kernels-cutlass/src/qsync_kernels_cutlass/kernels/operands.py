"""Operands as tensor cores read them: rows of whole 16 bytes, the inner dimension of the layout contiguous.

Operands that are so already are read in place.  All others are copied into a workspace from torch's allocator: transposed by a
kernel of this package where that is all it takes, converted (8-bit copies that a 16-bit product reads), or padded with zeros.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.compiling.compile import compiled
from qsync_kernels_cutlass.compiling.library import Library, describe_call, fresh_arguments
from qsync_kernels_cutlass.configs.validity import ALIGNMENT_BYTES
from qsync_kernels_cutlass.sources import convert_source, transpose_source

FORMATS = {
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
DTYPES = {name: dtype for dtype, name in FORMATS.items()}


def current_stream(device: int) -> int:
    """The CUDA stream that torch uses now on a device, as an address."""
    return torch._C._cuda_getCurrentRawStream(device)  # what torch.compile's code calls; the public way takes ten times as long


@lru_cache
def sm_count(device: int) -> int:
    """Multiprocessors of a device; looked up once, because every call passes them."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def is_ready(x: torch.Tensor, inner: int) -> bool:
    """Whether tensor cores can read the 2-d tensor in place, with dimension ``inner`` contiguous."""
    outer_stride = x.stride(1 - inner)
    return (
        x.stride(inner) == 1
        and outer_stride * x.element_size() % ALIGNMENT_BYTES == 0
        and outer_stride >= x.shape[inner]
        and x.data_ptr() % ALIGNMENT_BYTES == 0
    )


class OperandCopies:
    """The kernels that bring operands into shape on one chip; compiled when they are first needed."""

    def __init__(self, arch: Architecture) -> None:
        """Nothing is compiled yet.

        Args:
            arch: chip to compile for.
        """
        self._arch = arch
        self._libraries: dict[tuple[str, str], Library] = {}

    def prepare(self, *needed: tuple[str, str]) -> None:
        """Compile kernels now: ``("transpose", "")``, or formats (from, to) of a conversion."""
        for key in needed:
            self._library(key)

    def in_layout(self, x: torch.Tensor, inner: int, shape: tuple[int, int]) -> torch.Tensor:
        """The 2-d tensor with dimension ``inner`` contiguous and rows that start at multiples of 16 bytes: itself or a copy.

        Args:
            x: 2-d, any strides.
            inner: 1 for contiguous rows, 0 for contiguous columns.
            shape: of the result, at least that of ``x``; what is added is zero.
        """
        if x.shape == shape and is_ready(x, inner):
            return x
        rows, shape = (x, shape) if inner == 1 else (x.t(), shape[::-1])
        copy = _workspace(shape, rows.shape[0], x.dtype, x.device)
        if x.element_size() == 1 and rows.stride(0) == 1 and rows.stride(1) >= rows.shape[0]:
            self._run(("transpose", ""), rows.t(), copy, None)
        else:
            name = FORMATS[x.dtype]
            self._run((name, name), _with_plain_rows(rows), copy, None)
        copy = _first(copy, shape)
        return copy if inner == 1 else copy.t()

    def converted(
        self, x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, inner: int, shape: tuple[int, int]
    ) -> torch.Tensor:
        """``scale * x`` in another format, otherwise as :meth:`in_layout`.

        Args:
            x: 2-d, any strides.
            scale: float32, one element or one per row of ``x``; None multiplies nothing.
            dtype: of the result.
            inner: dimension that is contiguous in the result.  Columns are made by a second copy.
            shape: of the result, at least that of ``x``; what is added is zero.
        """
        out = _workspace(shape, x.shape[0], dtype, x.device)
        self._run((FORMATS[x.dtype], FORMATS[dtype]), _with_plain_rows(x), out, scale)
        return self.in_layout(_first(out, shape), inner, shape)

    def _library(self, key: tuple[str, str]) -> Library:
        if key not in self._libraries:
            source = transpose_source(self._arch) if key[0] == "transpose" else convert_source(self._arch, *key)
            self._libraries[key] = compiled(source)
        return self._libraries[key]

    def _run(self, key: tuple[str, str], x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None) -> None:
        device = x.get_device()
        rows, columns = x.shape
        q = fresh_arguments()
        q.m, q.n, q.k = rows, columns, out.shape[1]
        q.lda = x.stride(0) if rows > 1 else max(x.stride(0), columns)
        q.ldo = out.stride(0)
        q.a, q.out = x.data_ptr(), out.data_ptr()
        if scale is not None:
            q.a_scale, q.a_scale_count = scale.data_ptr(), scale.numel()
        q.stream, q.device, q.sm_count = current_stream(device), device, sm_count(device)

        def describe() -> str:
            what = "transposing" if key[0] == "transpose" else "copying"
            return describe_call(f"{what} an operand", (x.shape,), f"{FORMATS[x.dtype]} -> {FORMATS[out.dtype]}")

        self._library(key).call(q, describe)


def _first(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The first rows and columns of a matrix: itself where these are all, because slicing takes longer than a launch."""
    return x if x.shape == shape else x[: shape[0], : shape[1]]


def _workspace(shape: tuple[int, int], filled_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a matrix with rows of whole 16 bytes; zero where the copying kernel, which fills whole rows, leaves rows out."""
    width = round_up(shape[1], ALIGNMENT_BYTES // dtype.itemsize)
    return (torch.empty if shape[0] == filled_rows else torch.zeros)((shape[0], width), dtype=dtype, device=device)


def _with_plain_rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are contiguous and do not overlap."""
    one_column = x.shape[1] == 1
    return x if (x.stride(1) == 1 or one_column) and (x.stride(0) >= x.shape[1] or x.shape[0] == 1) else x.contiguous()


@lru_cache
def operand_copies(arch: Architecture) -> OperandCopies:
    """The one set of copying kernels of a chip."""
    return OperandCopies(arch)
