"""The C interface and its mirror in Python: the same fields in the same order, all 8 bytes wide, and the same statuses."""

from __future__ import annotations

import ctypes
import re

import pytest

from qsync_kernels_cutlass.compiling import library
from qsync_kernels_cutlass.compiling.compile import TEMPLATES
from qsync_kernels_cutlass.compiling.library import describe_call

HEADER = (TEMPLATES / "abi.h").read_text()


def declared_fields():
    body = re.search(r"struct QsyncArguments \{(.*?)\n\};", HEADER, re.DOTALL)[1]
    statements = re.sub(r"//[^\n]*", "", body).split(";")
    for statement in statements:
        declared = re.fullmatch(r"\s*(int64_t|(?:const )?(?:void|float)\s*\*)\s*([\w\s,]+)", statement)
        assert declared or not statement.strip(), f"a field of another type: {statement}"
        if declared:
            kind = ctypes.c_int64 if declared[1] == "int64_t" else ctypes.c_void_p
            yield from ((name.strip(), kind) for name in declared[2].split(","))


def test_fields_have_the_same_order_and_kind():
    assert list(declared_fields()) == list(library.Arguments._fields_)
    assert ctypes.sizeof(library.Arguments) == 8 * len(library.Arguments._fields_)


def test_statuses_have_the_same_numbers():
    declared = {name: int(number) for name, number in re.findall(r"#define QSYNC_(\w+) (\d+)", HEADER) if name != "EXPORT"}
    rasters = {name: declared.pop(name) for name in list(declared) if name.startswith("RASTER_")}
    assert declared == {name: getattr(library, name) for name in declared}
    assert rasters == {
        "RASTER_AUTO": library.RASTER["auto"],
        "RASTER_ALONG_M": library.RASTER["m"],
        "RASTER_ALONG_N": library.RASTER["n"],
    }


def test_arguments_start_with_what_every_call_needs():
    arguments = library.Arguments(m=3, a=0x10)
    assert arguments.struct_bytes == ctypes.sizeof(library.Arguments)
    assert (arguments.m, arguments.a, arguments.b) == (3, 0x10, None)
    assert (arguments.batch, arguments.groups, arguments.swizzle, arguments.splits) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (library.MISALIGNED, "not aligned"),
        (library.WORKSPACE_TOO_SMALL, "workspace is missing or too small"),
        (library.CUDA_ERROR + 700, "CUDA reported error 700"),
        (77, "unknown status 77"),
        (-1, "unknown status -1"),
    ],
)
def test_statuses_have_words(status, meaning):
    assert meaning in library.describe_status(status)


def test_the_description_of_a_call_names_operator_shapes_formats_and_configuration():
    described = "linear.output (int8 x int8 -> bfloat16) of shapes (4, 8), (16, 8)"
    assert describe_call("linear.output", ((4, 8), (16, 8)), "int8 x int8 -> bfloat16") == described
    assert describe_call("linear.output", ((4, 8), (16, 8)), "int8 x int8 -> bfloat16", "path=tma") == (
        described + " with the configuration path=tma"
    )
