"""Frozen weights that are stored in NF4 or int8, written dense in a float format for the product that reads them.

Each format is read once and the weight written once, in one launch: the sums are those of PyTorch's operators, in their order, so
that the bits are too.  Memory binds these kernels: an element of NF4 is half a byte to read and, in 16 bits, two to write.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from qsync_core.ir.precision import INT8_BLOCK_COLUMNS, NF4_BLOCK, NF4_CONSTANTS, Storage
from qsync_core.kernels.launches import HERE
from qsync_core.kernels.nf4 import NF4_CODES, dynamic_codes
from qsync_kernels_triton.config import StoredConfig
from qsync_kernels_triton.launching import Launch, Planned, refuse
from qsync_kernels_triton.products.fitting import FLOATS, device_problems

_ELEMENTS = tl.constexpr(8)
"""Elements of NF4 in a word of 32 bits, which a thread reads at once."""
_WORDS = tl.constexpr(NF4_BLOCK // 8)
"""Words that share a constant."""
_CONSTANTS = tl.constexpr(NF4_CONSTANTS)
_COUNT = tl.constexpr(len(NF4_CODES))


@triton.jit
def _constant(block, inside, scale_ptr, constants_ptr, mean_ptr, codes_ptr):
    """The largest magnitudes of blocks: rounded after the product and after the sum."""
    code = tl.load(constants_ptr + block, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + block // _CONSTANTS, mask=inside, other=0.0)
    return tl.load(codes_ptr + _COUNT + code) * scale + tl.load(mean_ptr)


@triton.jit
def dequantize_nf4(
    values_ptr, scale_ptr, constants_ptr, mean_ptr, codes_ptr, out_ptr, words, rest, WORDS: tl.constexpr, REST: tl.constexpr
):
    """out[i] = code of element i times the constant of its block; grid (programs,).

    ``words``: of 8 elements; ``rest``: elements behind them, if REST.  ``codes_ptr``: of elements, then of constants.
    """
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    packed = tl.load(values_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=inside, other=0)
    largest = _constant(word // _WORDS, inside, scale_ptr, constants_ptr, mean_ptr, codes_ptr)
    element = tl.arange(0, _ELEMENTS)
    upper = (1 - element % 2) * 4  # the first of two elements lies in the upper bits of their byte
    code = (packed[:, None] >> (element // 2 * 8 + upper)[None, :]) & 15
    value = (tl.load(codes_ptr + code) * largest[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + word[:, None] * _ELEMENTS + element[None, :], value, mask=inside[:, None])
    if REST:
        is_last = tl.program_id(0) == tl.num_programs(0) - 1
        behind = element < tl.where(is_last, rest, 0)
        last = tl.zeros_like(element).to(tl.int64) + words
        byte = tl.load(values_ptr + last * (_ELEMENTS // 2) + element // 2, mask=behind, other=0).to(tl.int32)
        its_largest = _constant(last // _WORDS, behind, scale_ptr, constants_ptr, mean_ptr, codes_ptr)
        its_value = (tl.load(codes_ptr + ((byte >> upper) & 15)) * its_largest).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + last * _ELEMENTS + element, its_value, mask=behind)


@triton.jit
def dequantize_int8(
    q_ptr, scale_ptr, out_ptr, groups, length, per_row, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr
):
    """out[r, i] = scale of the row or of the block times q[r, i]; grid (programs,).

    A row of ``length`` elements is ``per_row`` groups of COLUMNS, of which the last may be shorter; of ``groups`` in all a program
    has GROUPS.
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, inside = group // per_row, group < groups
    column = (group - row * per_row)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(scale_ptr + (row if BY_ROW else group), mask=inside, other=0.0)
    position = row.to(tl.int64)[:, None] * length + column
    inside = inside[:, None] & (column < length)
    value = tl.load(q_ptr + position, mask=inside, other=0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + position, value.to(out_ptr.dtype.element_ty), mask=inside)


@functools.cache
def _codes(device: torch.device) -> torch.Tensor:
    return torch.tensor((*NF4_CODES, *dynamic_codes()), dtype=torch.float32, device=device)


def build_dequantize(storage: Storage, config: StoredConfig) -> Planned:
    """The kernel ``dequantize(values, scale, constants, mean, out)``; it allocates nothing.

    ``out`` is contiguous, float32, float16 or bfloat16, of the weight's shape; ``values`` int8 of that shape, or of NF4 uint8 with
    two elements each; ``scale``, and of NF4 ``constants`` and ``mean``, as :class:`~qsync_core.ir.precision.Storage` says.
    Operands with gaps between their elements are copied first.
    """

    def plan(*operands: Any) -> Callable[..., None]:
        refuse("dequantize", _problems(storage, *operands))
        values, scale, *_, out = operands
        if not out.numel():
            return lambda *_: None
        run = _plan_nf4(out, config) if storage is Storage.NF4 else _plan_int8(storage, scale, out, config)
        if values.is_contiguous() and scale.is_contiguous() and (storage is not Storage.NF4 or operands[2].is_contiguous()):
            return run
        return lambda *given: run(*(x if x is None else x.contiguous() for x in given[:-1]), given[-1])

    return Planned(plan)


def _plan_nf4(out: torch.Tensor, config: StoredConfig) -> Callable[..., None]:
    words, rest = divmod(out.numel(), 8)
    block = min(config.block // 8, max(16, triton.next_power_of_2(words)))
    launch = Launch(dequantize_nf4, {"WORDS": block, "REST": rest > 0}, num_warps=config.warps)
    grid, codes = (max(1, triton.cdiv(words, block)), 1, 1), _codes(out.device)

    def run(values: Any, scale: Any, constants: Any, mean: Any, out: torch.Tensor) -> None:
        if (recorder := HERE.recorder) is not None:
            recorder.keeps(codes)
            if values.data_ptr() % 16:  # of which some have words that cannot be read, and some not
                recorder.refuse("what is stored is a part of another tensor")
        if values.data_ptr() % 4:  # a part of another tensor, whose words cannot be read
            values = values.clone()
        launch(grid, None, (values, scale, constants, mean, codes, out), (words, rest))

    return run


def _plan_int8(storage: Storage, scale: torch.Tensor, out: torch.Tensor, config: StoredConfig) -> Callable[..., None]:
    rows, by_row = out.shape[0], storage is Storage.INT8_ROW
    length = out.numel() // rows
    columns = min(256, max(16, triton.next_power_of_2(length))) if by_row else INT8_BLOCK_COLUMNS
    per_row = triton.cdiv(length, columns)
    groups = rows * per_row
    high = min(max(1, config.block // columns), triton.next_power_of_2(groups))
    launch = Launch(dequantize_int8, {"GROUPS": high, "COLUMNS": columns, "BY_ROW": by_row}, num_warps=config.warps)
    grid, numbers = (triton.cdiv(groups, high), 1, 1), (groups, length, per_row)

    def run(values: Any, scale: Any, constants: None, mean: None, out: torch.Tensor) -> None:
        launch(grid, None, (values, scale, out), numbers)

    return run


def _problems(storage: Storage, values: Any, scale: Any, constants: Any, mean: Any, out: Any) -> Iterator[str]:
    """Operands that are not those of a stored weight, each a sentence."""
    yield from device_problems(values, scale, constants, mean, out)
    if out.dtype not in FLOATS or not out.is_contiguous():
        yield f"out must be contiguous float32, float16 or bfloat16, got {out.dtype} with strides {out.stride()}"
    numel, rows = out.numel(), out.shape[0] if out.ndim else 1
    count = -(-numel // NF4_BLOCK)
    wanted: dict[str, tuple[Any, torch.dtype, int]]
    if storage is Storage.NF4:
        wanted = {
            "values": (values, torch.uint8, -(-numel // 2)),
            "scale": (scale, torch.float32, -(-count // NF4_CONSTANTS)),
            "constants": (constants, torch.uint8, count),
            "mean": (mean, torch.float32, 1),
        }
    else:
        blocks = 1 if storage is Storage.INT8_ROW else -(-(numel // max(1, rows)) // INT8_BLOCK_COLUMNS)
        wanted = {"values": (values, torch.int8, numel), "scale": (scale, torch.float32, rows * blocks)}
    for name, (found, dtype, size) in wanted.items():
        if not isinstance(found, torch.Tensor) or found.dtype is not dtype or found.numel() != size:
            got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            yield f"{name} of a weight of shape {tuple(out.shape)} stored as {storage} must be {size} {dtype}, got {got}"
