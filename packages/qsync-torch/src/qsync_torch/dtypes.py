"""Core's number formats as torch's dtypes, and back."""

from __future__ import annotations

import torch

from qsync_core.ir.precision import Precision

TORCH_DTYPE: dict[Precision, torch.dtype] = {
    Precision.INT8: torch.int8,
    Precision.FLOAT8_E4M3FN: torch.float8_e4m3fn,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.FLOAT16: torch.float16,
    Precision.FLOAT32: torch.float32,
}
"""The torch dtype of each format."""

PRECISION: dict[torch.dtype, Precision] = {dtype: precision for precision, dtype in TORCH_DTYPE.items()}
"""The format of each torch dtype that QSync knows."""

LOW_FLOATS = frozenset({torch.bfloat16, torch.float16})
"""Floating-point dtypes that an activation may have besides float32."""
