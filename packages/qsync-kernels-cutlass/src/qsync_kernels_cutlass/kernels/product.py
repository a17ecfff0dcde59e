"""One matrix product on torch tensors: out[m, n] = a_scale[m] * (b_scale[n] * sum over k of a[m, k] * b[n, k]) + bias[n]."""

from __future__ import annotations

import torch

from qsync_core.errors import BackendError
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.compiling.compile import compiled
from qsync_kernels_cutlass.compiling.library import RASTER, Arguments, describe_call
from qsync_kernels_cutlass.configs.config import Family, GemmConfig, Scheduler
from qsync_kernels_cutlass.configs.problem import BYTES, GemmProblem
from qsync_kernels_cutlass.configs.validity import ALIGNMENT_BYTES
from qsync_kernels_cutlass.kernels.operands import (
    DTYPES,
    FORMATS,
    current_stream,
    is_ready,
    operand_copies,
    round_up,
    sm_count,
)
from qsync_kernels_cutlass.sources import gemm_source, rows_contiguous
from qsync_kernels_cutlass.support import SIZE_LIMIT

_FRESH = Arguments.from_buffer_copy
_MOST_REMEMBERED = 1024
"""Combinations of shapes and strides; a job with more starts to remember anew."""


class Product:
    """A compiled product.  Calling it launches work on the current stream and waits for nothing.

    Any strides, sizes and alignments are right: what the kernel cannot read or write in place goes through a workspace.

    Attributes:
        op: operator that error messages name.
        copies: the kernels that bring operands into shape.
        inner_a, inner_b: dimension of (m, k) and (n, k) operands that the kernel reads contiguously; any where ``strided``.
        strided: the kernel takes any strides.
        out_dtype: of the result.
    """

    def __init__(self, config: GemmConfig, arch: Architecture, problem: GemmProblem) -> None:
        """Compile or load the kernel.

        Args:
            config: valid for the chip and the problem.
            arch: chip to compile for.
            problem: operator and formats; calls may have other sizes than the problem's.

        Raises:
            BackendError: when it cannot be compiled.
        """
        self._config, self._problem = config, problem
        self.op = problem.op
        self._library = compiled(gemm_source(config, arch, problem))
        self.copies = operand_copies(arch)
        rows_a, rows_b = rows_contiguous(problem)
        self.inner_a, self.inner_b = int(rows_a), int(rows_b)
        self.strided = config.path is Family.SIMT
        self.a_dtype, self.b_dtype = DTYPES[problem.a_format], DTYPES[problem.b_format]
        self.out_dtype = DTYPES[problem.out_format]
        # TMA reads zeros beyond any extent.  The 2.x kernels guard 16 bytes at a time, so extents along contiguous dimensions are
        # padded to that.
        whole = config.path is Family.MMA
        operand, result = (ALIGNMENT_BYTES // BYTES[name] if whole else 1 for name in (problem.a_format, problem.out_format))
        self._multiples = (
            1 if rows_a else operand,
            result if rows_b else max(operand, result),
            operand if rows_a or rows_b else 1,
        )
        self._whole_vectors = whole
        self._stream_k = config.scheduler is Scheduler.STREAM_K
        self._knobs = Arguments(raster=RASTER[str(config.raster)], swizzle=config.swizzle, splits=config.splits)
        self._in_place: dict[tuple[object, ...], Arguments] = {}

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the product into ``out``.

        Args:
            a: (m, k).
            b: (n, k).
            a_scale: float32, 1 or m elements, of any strides; None counts as 1.
            b_scale: float32, 1 or n elements, of any strides; None counts as 1.
            bias: n elements, any float format and strides; None counts as 0.
            out: (m, n).

        Raises:
            BackendError: for shapes that do not belong together, formats and devices that are not the kernel's, sizes of 2^31.
        """
        # Calls of one training step repeat in every next one: what follows from shapes and strides is worked out once.
        known = self._in_place.get((a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride()))
        if known is None or not self._repeated(known, a, b, a_scale, b_scale, bias, out):
            self._any_call(a, b, a_scale, b_scale, bias, out)

    def _repeated(
        self,
        known: Arguments,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> bool:
        """Run a call whose shapes and strides are known to be read in place; False where something else needs care."""
        device = a.get_device()
        q = _FRESH(known)
        q.a, q.b, q.out = addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
        every = addresses[0] | addresses[1] | addresses[2]  # its low bits say whether one is misaligned
        if a_scale is not None:
            count = a_scale.numel()
            if count not in (1, q.m) or not _is_vector(a_scale, device):
                return False
            q.a_scale, q.a_scale_count = a_scale.data_ptr(), count
        if b_scale is not None:
            address, count = b_scale.data_ptr(), b_scale.numel()
            if count not in (1, q.n) or not _is_vector(b_scale, device):
                return False
            q.b_scale, q.b_scale_count = address, count
            every |= address if self._whole_vectors and count != 1 else 0
        if bias is not None:
            address = q.bias = bias.data_ptr()
            if bias.numel() != q.n or not _is_vector(bias, device):
                return False
            every |= address if self._whole_vectors else 0
        if every % ALIGNMENT_BYTES and not self.strided:
            return False
        if a.dtype is not self.a_dtype or b.dtype is not self.b_dtype or out.dtype is not self.out_dtype:
            return False
        if device != q.device or b.get_device() != device or out.get_device() != device:
            return False
        q.stream = current_stream(device)
        if self._stream_k:
            workspace = _workspace(q.workspace_bytes, a.device)
            q.workspace = workspace.data_ptr()
        self._library.call(q, lambda: self._describe(a, b, out))
        return True

    def _any_call(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        if bias is not None and bias.dtype is not torch.float32:
            bias = bias.to(torch.float32)
        a_scale, b_scale, bias = _dense(a_scale), _dense(b_scale), _dense(bias)
        problem = self._problem_with(a, b, a_scale, b_scale, bias, out)
        if problem is not None:
            raise BackendError(f"{self._describe(a, b, out)} cannot run: {problem}")
        (m, k), n = a.shape, b.shape[0]
        if m == 0 or n == 0:
            return
        if k == 0:
            out.zero_() if bias is None else out.copy_(bias.expand_as(out))
            return
        whole_m, whole_n, whole_k = self.padded(m, n, k)
        if not self.strided:
            a = self.copies.in_layout(a, self.inner_a, (whole_m, whole_k))
            b = self.copies.in_layout(b, self.inner_b, (whole_n, whole_k))
        if self._whole_vectors:
            a_scale, b_scale, bias = _vector(a_scale, m, whole_m), _vector(b_scale, n, whole_n), _vector(bias, n, whole_n)
        if self.strided or ((whole_m, whole_n) == (m, n) and is_ready(out, 1)):
            self._launch(a, b, a_scale, b_scale, bias, out)
            return
        width = round_up(whole_n, ALIGNMENT_BYTES // out.element_size())
        whole = torch.empty((whole_m, width), dtype=out.dtype, device=out.device)
        self._launch(a, b, a_scale, b_scale, bias, whole[:, :whole_n])
        out.copy_(whole[:m, :n])

    def padded(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """The sizes that the kernel runs a product of (m, n, k) in."""
        by_m, by_n, by_k = self._multiples
        return round_up(m, by_m), round_up(n, by_n), round_up(k, by_k)

    def _launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Run a call whose operands the kernel can read in place, and remember what follows from their shapes and strides."""
        device = a.get_device()
        q = _FRESH(self._knobs)
        q.m, q.k = a.shape
        q.n = b.shape[0]
        if self.strided:
            q.lda, q.stride_a = a.stride()
            q.ldb, q.stride_b = b.stride()
            q.ldo, q.stride_o = out.stride()
        else:
            q.lda, q.ldb, q.ldo = a.stride(1 - self.inner_a), b.stride(1 - self.inner_b), out.stride(0)
        q.a_scale_count = q.b_scale_count = 1
        q.device, q.sm_count = device, sm_count(device)
        if self._stream_k:
            q.a, q.b, q.out = a.data_ptr(), b.data_ptr(), out.data_ptr()
            q.workspace_bytes = self._library.workspace_bytes(q, lambda: self._describe(a, b, out))
        if len(self._in_place) >= _MOST_REMEMBERED:
            self._in_place.clear()
        self._in_place[a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride()] = q
        if not self._repeated(q, a, b, a_scale, b_scale, bias, out):
            raise BackendError(f"{self._describe(a, b, out)} cannot run: an operand that was made for it does not fit")

    def _describe(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> str:
        formats = f"{FORMATS.get(a.dtype, a.dtype)} x {FORMATS.get(b.dtype, b.dtype)} -> {FORMATS.get(out.dtype, out.dtype)}"
        return describe_call(self.op, (a.shape, b.shape), formats, self._config.text)

    def _problem_with(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> str | None:
        if a.dim() != 2 or b.dim() != 2:
            return f"the operands are matrices, got {a.dim()} and {b.dim()} dimensions"
        (m, k), (n, width) = a.shape, b.shape
        if k != width or out.shape != (m, n):
            return f"operands of these shapes do not give an output of shape {tuple(out.shape)}"
        if a.dtype is not self.a_dtype or b.dtype is not self.b_dtype or out.dtype is not self.out_dtype:
            return f"the kernel was built for {self._problem.a_format} x {self._problem.b_format} -> {self._problem.out_format}"
        device = a.get_device()
        if device < 0 or b.get_device() != device or out.get_device() != device:
            return f"the tensors are on {a.device}, {b.device} and {out.device}, expected one CUDA device"
        for name, scale, size in (("first", a_scale, m), ("second", b_scale, n)):
            if scale is None:
                continue
            if scale.dtype is not torch.float32 or scale.get_device() != device:
                return f"the {name} operand's scale is {scale.dtype} on {scale.device}, expected float32 on {a.device}"
            if scale.numel() not in (1, size):
                return f"the {name} operand has {scale.numel()} scales, expected 1 or {size}"
        if bias is not None and (bias.numel() != n or bias.get_device() != device):
            return f"the bias has {bias.numel()} elements on {bias.device}, expected {n} on {a.device}"
        if not self.strided and (m >= SIZE_LIMIT or n >= SIZE_LIMIT or k >= SIZE_LIMIT):
            return "a dimension has 2^31 elements or more; split it"
        return None


def _dense(values: torch.Tensor | None) -> torch.Tensor | None:
    """The kernels read scales and biases one after the other; a strided one (a column of a parameter, a slice) is copied."""
    return None if values is None else values.contiguous()


def _is_vector(values: torch.Tensor, device: int) -> bool:
    return values.dtype is torch.float32 and values.get_device() == device and values.is_contiguous()


def _workspace(size: int, device: torch.device) -> torch.Tensor:
    """Device memory; at least one byte, because the address of an empty allocation is null and means a missing one."""
    return torch.empty(max(1, size), dtype=torch.uint8, device=device)


def _vector(values: torch.Tensor | None, size: int, padded: int) -> torch.Tensor | None:
    """A vector that the kernel reads 16 bytes at a time: aligned, and as long as the padded dimension; single values stay."""
    if values is None or values.numel() != size or (size == 1 and padded == 1):
        return values
    if padded != size:
        return torch.nn.functional.pad(values.view(-1), (0, padded - size))
    return values if values.data_ptr() % ALIGNMENT_BYTES == 0 else values.clone()
