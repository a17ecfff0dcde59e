"""Stand-ins for compiled convolution libraries: they read QsyncArguments as the kernels do, in numpy on CPU memory.

Every read goes through the arguments' pointers and strides, so a front-end that passes wrong ones gives wrong numbers here.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qsync_kernels_cutlass.compiling.library import Arguments

_OUT = {"f32": np.float32, "f16": np.float16}


def _memory(address: int, dtype: type, count: int) -> np.ndarray:
    buffer = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype)


class Interpreter:
    """A library for one source; ``calls`` keeps the arguments of every call."""

    def __init__(self, source) -> None:
        self.source = source
        self.calls: list[Arguments] = []

    def call(self, q: Arguments, describe: object) -> None:
        self.calls.append(Arguments.from_buffer_copy(q))
        if "fold" in self.source.name:
            self._fold(q)
        elif "turn" in self.source.name:
            self._turn(q)
        else:
            self._convolve(q, _OUT[self.source.name.rsplit("_", 1)[1]])

    def _fold(self, q: Arguments) -> None:
        x = _memory(q.a, np.int8, q.images * q.in_h * q.in_w * q.in_c).reshape(q.images, q.in_h, q.in_w, q.in_c)
        out = _memory(q.out, np.int8, q.images * q.out_h * q.out_w * q.lda).reshape(q.images, q.out_h, q.out_w, q.lda)
        out[:] = 0
        for h, w, dh, dw in np.ndindex(q.out_h, q.out_w, q.stride_h, q.stride_w):
            at_h, at_w = h * q.stride_h + dh - q.pad_h, w * q.stride_w + dw - q.pad_w
            if 0 <= at_h < q.in_h and 0 <= at_w < q.in_w:
                first = (dh * q.stride_w + dw) * q.in_c
                out[:, h, w, first : first + q.in_c] = x[:, at_h, at_w]

    def _turn(self, q: Arguments) -> None:
        shape = (q.out_c, q.filter_h, q.filter_w, q.in_c)
        w = _memory(q.b, np.int8, int(np.prod(shape))).reshape(shape)
        out = _memory(q.out, np.int8, w.size).reshape(q.in_c, q.filter_h, q.filter_w, q.out_c)
        out[:] = w[:, ::-1, ::-1].transpose(3, 1, 2, 0)

    def _convolve(self, q: Arguments, out_type: type) -> None:
        assert [value % 16 for value in (q.in_c, q.lda, q.stride_a, q.stride_b)] == [0, 0, 0, 0]
        assert max(q.stride_h, q.stride_w) <= 8
        assert q.out_c % (16 // np.dtype(out_type).itemsize) == 0
        assert [value % 16 for value in (q.a, q.b, q.out)] == [0, 0, 0]
        shape = (q.images, q.in_h, q.in_w, q.in_c)
        strides = (q.stride_b, q.stride_a, q.lda, 1)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        x = np.lib.stride_tricks.as_strided(_memory(q.a, np.int8, span), shape, strides).astype(np.int64)
        filters = (q.out_c, q.filter_h, q.filter_w, q.in_c)
        w = _memory(q.b, np.int8, int(np.prod(filters))).reshape(filters).astype(np.int64)
        x = np.pad(x, ((0, 0), (q.pad_h, q.pad_h), (q.pad_w, q.pad_w), (0, 0)))
        total = np.zeros((q.images, q.out_h, q.out_w, q.out_c), np.int64)
        for r, s in np.ndindex(q.filter_h, q.filter_w):
            rows = r * q.dilation_h + q.stride_h * np.arange(q.out_h)
            columns = s * q.dilation_w + q.stride_w * np.arange(q.out_w)
            total += np.einsum("nhwc,kc->nhwk", x[:, rows][:, :, columns], w[:, r, s])
        scale = _memory(q.a_scale, np.float32, 1)
        if q.b_scale:
            scale = scale * _memory(q.b_scale, np.float32, q.out_c if q.b_scale_count > 1 else 1)
        else:
            assert q.b_scale_count == 1
        value = total * scale + (_memory(q.bias, np.float32, q.out_c) if q.bias else 0.0)
        pixels = q.images * q.out_h * q.out_w
        out = _memory(q.out, out_type, (pixels - 1) * q.ldo + q.out_c)
        target = np.lib.stride_tricks.as_strided(out, (pixels, q.out_c), (q.ldo * out.itemsize, out.itemsize), writeable=True)
        target[:] = value.reshape(pixels, q.out_c)
