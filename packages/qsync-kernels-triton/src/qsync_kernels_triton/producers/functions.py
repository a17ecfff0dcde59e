"""Device functions: activations, their derivatives, and one bit for each element of a tile."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters of kernels have no Python types: Triton traces them.
from __future__ import annotations

import triton
import triton.language as tl

from qsync_core.ir.chain import Activation

ACTIVATION_CODE = {
    Activation.NONE: 0,
    Activation.RELU: 1,
    Activation.GELU: 2,
    Activation.GELU_TANH: 3,
    Activation.SILU: 4,
}
RELU: tl.constexpr = tl.constexpr(1)
GELU: tl.constexpr = tl.constexpr(2)
GELU_TANH: tl.constexpr = tl.constexpr(3)
SILU: tl.constexpr = tl.constexpr(4)


@triton.jit
def _reciprocal(x):
    """1 / x of numbers from 1 on, to two units in the last place as a division is, in two instructions of its nine."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _sigmoid_and_slope(x):
    """sigmoid(x) and its derivative; 1 − sigmoid(x), of which rounding leaves little for large x, is worked out by itself."""
    e = tl.exp2(tl.abs(x) * -1.4426950408889634)
    above = _reciprocal(1.0 + e)
    below = e * above
    return tl.where(x < 0, below, above), below * above


@triton.jit
def _twice_tanh_argument(x):
    """2·√(2/π)·(x + 0.044715·x³): tanh(u) is 2·sigmoid(2u) − 1, and Triton has no tanh."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _normal_cdf(z):
    """Φ(z) = (1 + erf(z/√2)) / 2, the error at most 1.4e-8 beside float32's: a third of the error function's instructions.

    Φ(−t) is 2**−(1 + P(t)), P the polynomial of degree 8 for which the largest error of Φ is smallest; from there on both tails are
    rounded once.  P grows with t without end, and NaN stays NaN.
    """
    t = tl.abs(z)
    p = tl.fma(t, 2.83487402e-06, -3.93772818e-05)
    p = tl.fma(t, p, 1.86178540e-04)
    p = tl.fma(t, p, 1.36939924e-04)
    p = tl.fma(t, p, -7.06342408e-03)
    p = tl.fma(t, p, 5.24961806e-02)
    p = tl.fma(t, p, 4.59208196e-01)
    p = tl.fma(t, p, 1.15110521e00)
    tail = 0.5 * tl.exp2(-t * p)
    return tl.where(z < 0, tail, 1.0 - tail)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """f(z) in float32; NaN stays NaN."""
    if ACTIVATION == RELU:
        return tl.where(z <= 0, 0.0, z)
    elif ACTIVATION == GELU:
        return z * _normal_cdf(z)
    elif ACTIVATION == GELU_TANH:
        return z * _sigmoid(_twice_tanh_argument(z))
    elif ACTIVATION == SILU:
        return z * _sigmoid(z)
    else:
        return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """f′(z) in float32; of ReLU at 0 it is 0, as in PyTorch."""
    if ACTIVATION == RELU:
        return tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == GELU:
        return _normal_cdf(z) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == GELU_TANH:
        s, ds = _sigmoid_and_slope(_twice_tanh_argument(z))
        return s + z * ds * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif ACTIVATION == SILU:
        s, ds = _sigmoid_and_slope(z)
        return s + z * ds
    else:
        return z * 0 + 1.0


@triton.jit
def packed_bits(condition, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A (ROWS, BLOCK) condition as (ROWS, BLOCK / 8) bytes: bit c mod 8 of byte c div 8 is column c."""
    bits = tl.reshape(condition.to(tl.int32), (ROWS, BLOCK // 8, 8)) << tl.arange(0, 8)[None, None, :]
    return tl.sum(bits, 2).to(tl.uint8)


@triton.jit
def unpacked_bits(packed, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The condition that :func:`packed_bits` packed."""
    wide = tl.broadcast_to(packed.to(tl.int32)[:, :, None], (ROWS, BLOCK // 8, 8)) >> tl.arange(0, 8)[None, None, :]
    return (tl.reshape(wide, (ROWS, BLOCK)) & 1) > 0
