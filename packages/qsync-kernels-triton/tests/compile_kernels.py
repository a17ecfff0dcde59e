"""Compiles kernels for chips that are not there, and prints what the compiler made of them as JSON; run without the interpreter."""

from __future__ import annotations

import json
import sys
import warnings

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qsync_kernels_triton.elementwise import dequantize, dequantize_rows
from qsync_kernels_triton.products.conv2d import implicit_gemm
from qsync_kernels_triton.products.gemm import gemm, mixed_gemm
from qsync_kernels_triton.products.pointwise import pointwise_grad_weight
from qsync_kernels_triton.quantize.rows import (
    maxima_of_rows_and_columns,
    quantize_by_row_and_column,
    quantize_rows,
    quantize_twice_from_partials,
)
from qsync_kernels_triton.quantize.split import partial_absmax, quantize_from_partials
from qsync_kernels_triton.stored import dequantize_int8, dequantize_nf4

POINTERS = {
    "offset_ptr": "*i64",
    "stream_ptr": "*i64",
    "q_ptr": "*i8",
    "transposed_ptr": "*i8",
    "w_ptr": "*i8",
    "values_ptr": "*u8",
    "constants_ptr": "*u8",
}
WIDE = {"units": "i64"}
QUANTIZE = {"FORMAT": 0, "ROUNDING": 1, "LIVE": True, "STREAM": 1}
SPLIT = {"UNIT": 8, "BLOCK": 4096, "TAIL": True, "MULTIPLIER": 0}
PRODUCT = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}
FILTER = {"KERNEL_H": 3, "KERNEL_W": 3, "GROUPS": 1, "X_SCALE": True, "W_SCALES": 2, "WIDEN": False}


def cases(capability):
    overlap = {"OVERLAP": capability >= 90}
    yield "partial_absmax", partial_absmax, SPLIT | overlap | {"KEEP": "evict_last"}, {}
    rounding = QUANTIZE | SPLIT | {"PARTIALS": 1024, "ALIGNED": True, "OF_ZEROS": 1.0} | overlap
    yield "quantize_from_partials", quantize_from_partials, rounding, {}
    yield "partial_absmax bf16", partial_absmax, SPLIT | overlap | {"KEEP": "evict_last"}, {"x_ptr": "*bf16"}
    yield "quantize_from_partials bf16 e5m2", quantize_from_partials, rounding | {"FORMAT": 2}, {"x_ptr": "*bf16"}
    rows = QUANTIZE | {"UNIT": 8, "ROWS": 1, "BLOCK": 4096, "ALIGNED": True, "FULL": False, "MULTIPLIER": 1, "STREAM": 2}
    yield "quantize_rows", quantize_rows, rows | {"OF_ZEROS": 2.0**-126}, {}
    tile = {"ROW_UNIT": 16, "ROWS": 64, "BLOCK": 128, "PARTIALS": 1024, "FULL": True}
    yield (
        "quantize_twice",
        quantize_twice_from_partials,
        QUANTIZE | {"UNIT": 8, "ALIGNED": True, "MULTIPLIER": 0} | tile | overlap,
        {},
    )
    cut = {"UNIT": 8, "ROW_UNIT": 16, "ROWS": 64, "BLOCK": 128, "FULL": True, "MULTIPLIER": 1}
    for name, by_row in (("", False), (" rows multiplied", True)):
        cut |= {"ROW_MULTIPLIER": by_row}
        yield f"maxima_of_rows_and_columns{name}", maxima_of_rows_and_columns, cut, {"maxima_ptr": "*i32"}
        both = QUANTIZE | cut | {"ALIGNED": True}
        yield f"quantize_by_row_and_column{name}", quantize_by_row_and_column, both, {"maxima_ptr": "*i32"}
    whole, by_row, half = {"BLOCK": 8192}, {"ROWS": 32, "BLOCK": 256, "COLUMNS": True}, {"out_ptr": "*fp16"}
    yield "dequantize", dequantize, whole, half
    yield "dequantize_rows", dequantize_rows, by_row, half
    nf4 = {"WORDS": 512, "REST": False}
    yield "dequantize_nf4", dequantize_nf4, nf4, {"out_ptr": "*bf16"}
    yield "dequantize_nf4 with a rest", dequantize_nf4, nf4 | {"REST": True}, half
    for name, columns in (("row", 256), ("block", 128)):
        cut = {"GROUPS": 4096 // columns, "COLUMNS": columns, "BY_ROW": name == "row"}
        yield f"dequantize_int8 by {name}", dequantize_int8, cut, {"out_ptr": "*bf16"}
    scaled = {"ACCUMULATOR": tl.int32, "A_SCALES": 1, "B_SCALES": 2, "BIAS": True, "EVEN_K": True}
    operands = {"a_ptr": "*i8", "b_ptr": "*i8", "out_ptr": "*bf16"}
    yield "gemm", gemm, PRODUCT | scaled, operands
    unit = {
        "a_inner": 1,
        "b_column": 1,
        "INNER_SCALES": True,
        "SCALE_FIRST": False,
        "EVEN_K": True,
        "WIDEN": False,
        "COLUMNS": True,
    }
    yield "mixed_gemm", mixed_gemm, PRODUCT | unit, operands | {"a_ptr": "*bf16"}
    tall = PRODUCT | {"BLOCK_M": 64, "BLOCK_N": 256, "GROUP_M": 1, "EVEN_K": True, "WIDEN": False}
    for name, strided in (("pointwise_grad_weight", False), ("pointwise_grad_weight strided", True)):
        yield name, pointwise_grad_weight, tall | {"STRIDED": strided}, {"grad_ptr": "*fp16", "x_ptr": "*i8"}
    convolution = {"ACCUMULATOR": tl.int32, "BIAS": False, "EVEN_K": True, **FILTER}
    yield "implicit_gemm", implicit_gemm, PRODUCT | convolution, {"x_ptr": "*i8", "out_ptr": "*bf16"}
    if capability >= 90:
        kept = half | {"q_ptr": "*fp8e4nv"}
        yield "dequantize e4m3", dequantize, whole, kept
        yield "dequantize_rows e4m3", dequantize_rows, by_row, kept
        float8 = {"ACCUMULATOR": tl.float32, "BLOCK_K": 128}
        yield "gemm_float8", gemm, PRODUCT | scaled | float8, operands | {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv"}
        eight = {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "out_ptr": "*bf16"}
        yield "implicit_gemm_float8", implicit_gemm, PRODUCT | convolution | float8, eight


def compiled(function, constants, types, capability):
    names = function.arg_names
    signature, divisible = {}, {}
    for position, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = name.endswith("_ptr")
        signature[name] = types.get(name) or POINTERS.get(name) or (("*fp32") if pointer else WIDE.get(name, "i32"))
        if pointer or function in (dequantize_int8, gemm, mixed_gemm, implicit_gemm, pointwise_grad_weight):
            divisible[(position,)] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, values, divisible)
    options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {}
    for capability in map(int, sys.argv[1:]):
        for name, function, constants, types in cases(capability):
            kernel = compiled(function, constants, types, capability)
            ptx = kernel.asm["ptx"]
            found[f"{name} sm_{capability}"] = {
                "shared": kernel.metadata.shared,
                "conversions": kernel.asm["ttgir"].count("ttg.convert_layout"),
                "wide_loads": ptx.count(".v4.b32"),
                "wide_stores": ptx.count("st.global.v4.b32"),
                "wide_products": ptx.count("mul.wide.u32"),
                "mma": ptx.count("mma.sync"),
                "wgmma": ptx.count("wgmma.mma_async"),
                "contracted": ptx.count("fma.rn"),
                "additions": ptx.count("add.f32") + ptx.count("add.rn.f32"),
            }
    print(json.dumps(found))
