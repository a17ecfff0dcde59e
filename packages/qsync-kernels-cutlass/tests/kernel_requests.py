"""Requests that tests put to the backend."""

from __future__ import annotations

import attrs

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op

INT8 = Variant.of(Precision.INT8, output=Precision.BFLOAT16)
FLOAT8 = Variant.of(Precision.FLOAT8_E4M3FN)
INT8_THROUGHOUT = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)


def linear(op=Op.LINEAR_OUTPUT, m=4608, k=768, n=3072, *, variant=INT8, capability="9.0"):
    shapes = {
        Op.LINEAR_OUTPUT: ((m, k), (n, k)),
        Op.LINEAR_GRAD_INPUT: ((m, n), (n, k)),
        Op.LINEAR_GRAD_WEIGHT: ((m, n), (m, k)),
    }[op]
    return KernelRequest(op, variant, shapes, device_kind="cuda", compute_capability=capability)


def conv2d(op=Op.CONV2D_OUTPUT, x=(32, 64, 56, 56), w=(128, 64, 3, 3), *, variant=INT8, capability="9.0", **attributes):
    return KernelRequest(op, variant, (x, w), Geometry.of({"padding": "1,1"} | attributes), "cuda", capability)
