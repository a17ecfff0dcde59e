"""The arguments and statuses of compiled kernels, mirrored from ``templates/abi.h`` (a test compares the two)."""

from __future__ import annotations

import ctypes

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
    NOT_SUPPORTED: "the kernel can not run these arguments on this device",
    WORKSPACE_TOO_SMALL: "the workspace is missing or too small",
    WRONG_ABI: "the library was compiled for other arguments than this version of qsync-kernels-cutlass passes",
    INTERNAL: "CUTLASS refused without telling why",
}

RASTER = {"auto": 0, "m": 1, "n": 2}
"""Run-time raster knob, by the text of :class:`~qsync_kernels_cutlass.config.Raster`."""

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


def fresh() -> Arguments:
    """Arguments with nothing but the defaults, to be filled in: a tenth of what the constructor takes."""
    return Arguments.from_buffer_copy(_DEFAULTS)


def describe_status(status: int) -> str:
    """What a status other than 0 means, as half a sentence."""
    if status >= CUDA_ERROR:
        return f"CUDA reported error {status - CUDA_ERROR}"
    return _MEANINGS.get(status, f"the kernel returned the unknown status {status}")
