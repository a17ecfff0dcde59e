"""Compiles producers for chips that are not there, as ``compile_kernels.py`` does the others; run without the interpreter."""

from __future__ import annotations

import json
import sys
import warnings

from compile_kernels import compiled

from qsync_kernels_triton.producers.activation import activate_rows, activation_gradient, glu_gradient, round_activated
from qsync_kernels_triton.producers.batch_norm import channel_coefficients, channel_statistics, normalize_positions
from qsync_kernels_triton.producers.batch_norm_gradient import apply_gradient, gradient_reach, reduce_gradient
from qsync_kernels_triton.producers.layer_norm import normalize_rows, round_normalized
from qsync_kernels_triton.producers.layer_norm_gradient import layer_norm_gradient
from qsync_kernels_triton.producers.sums import finish_sums

HALF = dict.fromkeys(
    ("x_ptr", "residual_ptr", "out_ptr", "sum_ptr", "grad_ptr", "grad_input_ptr", "grad_residual_ptr"), "*fp16"
) | {"q_ptr": "*i8", "x_q_ptr": "*i8", "open_ptr": "*u8", "offset_ptr": "*i64", "stream_ptr": "*i64", "eps": "fp32"}
SUMS = {"UNIT": 8, "ROWS": 64, "BLOCK": 64}
IMAGES = {"UNIT": 8, "ROWS": 16, "BLOCK": 256}
ROWS = {"UNIT": 8, "ROWS": 4, "BLOCK": 256, "HELD": 3}
GIVEN = {"WEIGHT": True, "BIAS": True}
ROUNDING = {"FORMAT": 0, "ROUNDING": 1, "ALIGNED": True, "LIVE": False, "STREAM": 1}
KEPT = {"WRITE_X": True, "X_FORMAT": 0}


EVERYWHERE = {"normalize_positions", "reduce_gradient", "normalize_rows", "layer_norm_gradient", "activation_gradient e4m3"}
"""Those that are compiled for every chip; the others for the last one alone, because compiling takes its time."""


def cases(capability):
    """Name, function, constants and types of arguments of each kernel."""
    yield "channel_statistics", channel_statistics, SUMS, {}
    block = {"RESIDUAL": True, "ACTIVATION": 1, "WRITE_ABSMAX": True}
    coefficients = {"ROWS": 64, "PARTIALS": 512, "BLOCK": 8} | GIVEN | block | KEPT
    yield "channel_coefficients", channel_coefficients, coefficients, {}
    wanted = dict.fromkeys(("WRITE_OUT", "WRITE_Q", "WRITE_OPEN"), True) | {"BOUNDS": 32}
    writing = IMAGES | GIVEN | block | ROUNDING
    yield "normalize_positions", normalize_positions, writing | wanted | KEPT, {}
    alone = {"RESIDUAL": False, "WRITE_ABSMAX": False, "WRITE_OUT": False, "WRITE_OPEN": False}
    kept = {"WRITE_X": False, "X_FORMAT": 0}
    yield "normalize_positions to int8", normalize_positions, writing | wanted | alone | kept, {}
    odd = {"UNIT": 1, "ALIGNED": False, "LIVE": True, "FORMAT": 1, "X_FORMAT": 1}
    yield "normalize_positions odd e4m3", normalize_positions, writing | wanted | KEPT | odd, {"x_ptr": "*bf16"}
    for name, eight_bit, opened in (("", False, 2), (" int8", True, 1)):
        types = {"x_ptr": "*i8"} if eight_bit else {}
        given = GIVEN | {"OPEN": opened, "EIGHT_BIT": eight_bit}
        yield f"reduce_gradient{name}", reduce_gradient, SUMS | given | {"REACH": eight_bit, "SUM": eight_bit}, types
        copied = {"WRITE_Q": eight_bit, "MULTIPLIER": eight_bit, "REACHES": 32, "ROUNDING": 1, "ALIGNED": True, "LIVE": eight_bit}
        written = {"WRITE_INPUT": True, "WRITE_RESIDUAL": eight_bit} | copied
        yield f"apply_gradient{name}", apply_gradient, IMAGES | given | written, types
    yield "gradient_reach", gradient_reach, {"ROWS": 128, "BLOCK": 16, "WEIGHT": True, "MULTIPLIER": True}, {}
    yield "finish_sums", finish_sums, {"ROWS": 128, "BLOCK": 16}, {}
    added = {"STREAM": 2}
    written = {"WRITE_SUM": True, "WRITE_OUT": True, "SCALES": 1} | KEPT | ROUNDING | added
    normalizing = ROWS | GIVEN | {"CENTERED": True, "RESIDUAL": True} | written
    yield "normalize_rows", normalize_rows, normalizing, {}
    yield "normalize_rows in five", normalize_rows, normalizing | {"BLOCK": 128, "HELD": 5}, {}
    yield "normalize_rows long", normalize_rows, normalizing | {"BLOCK": 4096, "ROWS": 1, "HELD": 0}, {}
    again = {name: value for name, value in ROWS.items() if name != "HELD"} | ROUNDING | {"PARTIALS": 1024}
    yield "round_normalized", round_normalized, again | GIVEN | {"RESIDUAL": False, "CENTERED": True}, {}
    gradient = ROWS | {"WEIGHT": True, "EIGHT_BIT": False, "WRITE_INPUT": True, "WRITE_SUMS": True, "CENTERED": True}
    yield "layer_norm_gradient", layer_norm_gradient, gradient, {}
    uncentered, wide = {"BIAS": False, "CENTERED": False}, {"ROWS": 1, "BLOCK": 2048, "HELD": 1}
    yield "normalize_rows rms", normalize_rows, normalizing | uncentered | wide, {"x_ptr": "*fp32"}
    yield "round_normalized rms", round_normalized, again | {"WEIGHT": True, "RESIDUAL": False} | uncentered, {"x_ptr": "*fp32"}
    yield "layer_norm_gradient rms", layer_norm_gradient, gradient | {"CENTERED": False}, {"x_ptr": "*fp32", "grad_ptr": "*fp32"}
    long = {"BLOCK": 4096, "ROWS": 1, "HELD": 0, "EIGHT_BIT": True}
    yield "layer_norm_gradient long", layer_norm_gradient, gradient | long, {"x_ptr": "*i8"}
    activating = ROWS | {"ACTIVATION": 2, "GATED": False, "WRITE_OUT": False, "SCALES": 1} | KEPT | ROUNDING | added
    yield "activate_rows", activate_rows, activating, {}
    yield "activate_rows in one", activate_rows, activating | {"BLOCK": 1024, "HELD": 1}, {}
    yield "round_activated", round_activated, again | {"ACTIVATION": 4, "GATED": False}, {}
    types = {"factor_ptr": "*fp16", "factor_q_ptr": "*i8", "grad_factor_ptr": "*fp16"}
    gating = {"ROWS": 1, "BLOCK": 1024, "HELD": 1, "ACTIVATION": 4, "GATED": True}
    yield "activate_rows gated", activate_rows, activating | gating, types
    yield "round_activated gated", round_activated, again | {"ACTIVATION": 4, "GATED": True}, types
    tile = {"UNIT": 8, "ROWS": 4, "BLOCK": 1024, "ACTIVATION": 3, "EIGHT_BIT": True}
    yield "activation_gradient", activation_gradient, tile, {"x_ptr": "*i8"}
    wanted = {"WRITE_INPUT": True, "WRITE_FACTOR": True, "SCALES": 1}
    wanted |= {"FORMAT": 0, "ROUNDING": 1, "ALIGNED": True, "LIVE": True}
    wanted |= {"MAXIMA": 3, "FACTOR_MAXIMA": 1}
    yield "glu_gradient", glu_gradient, tile | wanted, types | {"x_ptr": "*i8", "factor_ptr": "*i8"}
    if capability >= 89:
        yield "activation_gradient e4m3", activation_gradient, tile, {"x_ptr": "*fp8e4nv"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {}
    for capability in map(int, sys.argv[1:]):
        for name, function, constants, types in cases(capability):
            if capability < 90 and name not in EVERYWHERE:
                continue
            kernel = compiled(function, constants, HALF | types, capability)
            ptx = kernel.asm["ptx"]
            found[f"{name} sm_{capability}"] = {
                "shared": kernel.metadata.shared,
                "wide_loads": ptx.count("ld.global.v4.b32") + ptx.count("ld.global.v2.b32"),
                "narrow_loads": ptx.count("ld.global.b16"),
                "wide_products": ptx.count("mul.wide.u32"),
                "atomic_sums": sum("atom" in line and ".add" in line for line in ptx.splitlines()),
            }
    print(json.dumps(found))
