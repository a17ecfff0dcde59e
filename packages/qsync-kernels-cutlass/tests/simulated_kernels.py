"""Kernels of the C interface in plain torch on the CPU, for testing the front-ends that call them.

They read and write memory by the addresses, strides and sizes of the arguments, exactly as the compiled ones do, and insist on the
alignment that those insist on.
"""

from __future__ import annotations

import ctypes

import torch

from qsync_kernels_cutlass.compiling.library import Arguments
from qsync_kernels_cutlass.configs.config import Family
from qsync_kernels_cutlass.kernels.operands import DTYPES
from qsync_kernels_cutlass.sources import KernelSource

SHORT = {"s8": "int8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def memory(address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The matrix at an address."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


def vector(address: int | None, count: int, default: float) -> torch.Tensor:
    return memory(address, (1, count), (count, 1), torch.float32)[0] if address else torch.full((1,), default)


class SimulatedLibrary:
    """Stands for the library of a source; the source's name says what it does."""

    def __init__(self, source: KernelSource) -> None:
        self.name = source.name
        self.calls = 0

    def workspace_bytes(self, q: Arguments, describe: object) -> int:
        return 64

    def call(self, q: Arguments, describe: object) -> None:
        self.calls += 1
        if self.name == "transpose_bytes":
            assert q.m <= q.k <= q.ldo
            assert q.lda >= q.n
            out = memory(q.out, (q.n, q.k), (q.ldo, 1), torch.int8)
            out.zero_()[:, : q.m] = memory(q.a, (q.m, q.n), (q.lda, 1), torch.int8).t()
        elif self.name.startswith("convert_"):
            _, source, target = self.name.split("_")
            self._convert(q, DTYPES[SHORT[source]], DTYPES[SHORT[target]])
        else:
            self._multiply(q)

    def _convert(self, q: Arguments, source: torch.dtype, target: torch.dtype) -> None:
        assert q.n <= q.k <= q.ldo
        assert q.lda >= q.n
        out = memory(q.out, (q.m, q.k), (q.ldo, 1), target)
        values = memory(q.a, (q.m, q.n), (q.lda, 1), source)
        if q.a_scale:
            values = values.float() * vector(q.a_scale, q.a_scale_count, 1)[:, None]
        out.zero_()
        out[:, : q.n] = values.to(target)

    def _multiply(self, q: Arguments) -> None:
        _, path, a_name, b_name, out_name, layout, *_ = self.name.split("_")
        a_dtype, b_dtype, out_dtype = (DTYPES[SHORT[name]] for name in (a_name, b_name, out_name))
        strides = []
        for rows, leading, inner in ((layout[0] == "t", q.lda, q.stride_a), (layout[1] == "t", q.ldb, q.stride_b)):
            strides.append((leading, inner) if path == Family.SIMT else (leading, 1) if rows else (1, leading))
        out_strides = (q.ldo, q.stride_o if path == Family.SIMT else 1)
        if path != Family.SIMT:
            self._insist_on_alignment(q, path, layout, a_dtype.itemsize, out_dtype.itemsize)
        a = memory(q.a, (q.m, q.k), strides[0], a_dtype).double()
        b = memory(q.b, (q.n, q.k), strides[1], b_dtype).double()
        product = (a @ b.t()).float() * vector(q.b_scale, q.b_scale_count, 1)
        product = product * vector(q.a_scale, q.a_scale_count, 1)[:, None]
        product = product + vector(q.bias, q.n if q.bias else 1, 0)
        memory(q.out, (q.m, q.n), out_strides, out_dtype).copy_(product)

    def _insist_on_alignment(self, q: Arguments, path: str, layout: str, operand_bytes: int, out_bytes: int) -> None:
        operand, out = 16 // operand_bytes, 16 // out_bytes
        assert all(address % 16 == 0 for address in (q.a, q.b, q.out))
        assert (q.lda % operand, q.ldb % operand, q.ldo % out) == (0, 0, 0)
        if path == Family.MMA:
            assert (q.k if layout[0] == "t" else q.m) % operand == 0
            assert (q.k if layout[1] == "t" else q.n) % operand == 0
            assert q.n % out == 0
            assert (q.bias or 0) % 16 == 0
            assert q.b_scale_count == 1 or q.b_scale % 16 == 0
