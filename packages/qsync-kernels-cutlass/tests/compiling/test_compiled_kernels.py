"""Kernels compiled by nvcc for three generations of chips, without a GPU: they compile, export the C interface, and hold code for
the chip.  What they compute is tested on GPUs, in ``tests/gpu``.

Libraries stay in the kernel cache (``QSYNC_KERNEL_CACHE``), so that only the first run compiles.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from kernel_requests import INT8_THROUGHOUT, conv2d, linear

from nightly import nightly_but
from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Op
from qsync_core.progress import silent
from qsync_kernels_cutlass.architectures import SM_75, SM_80, SM_90A
from qsync_kernels_cutlass.compiling import toolchain
from qsync_kernels_cutlass.compiling.ahead import compile_ahead
from qsync_kernels_cutlass.compiling.compile import compile_files
from qsync_kernels_cutlass.compiling.library import Arguments, Library
from qsync_kernels_cutlass.configs import candidates
from qsync_kernels_cutlass.configs.problem import problem_of
from qsync_kernels_cutlass.sources import request_sources

CHIPS = [SM_75, SM_80, SM_90A]
PRODUCTS = {
    "linear": linear(),
    "convolution": conv2d(),
    "gradient of a convolution's input": conv2d(Op.CONV2D_GRAD_INPUT, x=(32, 128, 56, 56), variant=INT8_THROUGHOUT),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.find_nvcc() is None, reason="nvcc is not installed, so nothing can be compiled"),
    pytest.mark.skipif(toolchain.find_headers() is None, reason="CUTLASS's headers are not installed (nvidia-cutlass)"),
]


@pytest.fixture(scope="module", params=nightly_but({SM_75}, CHIPS), ids=lambda chip: chip.name)
def libraries(request):
    """A chip, and by request the libraries of its best-ranked configuration there."""
    chip = request.param
    if reason := toolchain.arch_reason(toolchain.find_nvcc(), chip.name):
        pytest.skip(reason)
    sources = {name: request_sources(one, candidates.ranked(problem_of(one), chip)[0], chip) for name, one in PRODUCTS.items()}
    flat = list(dict.fromkeys(source for found in sources.values() for source in found))
    made = {source: Library(path, source) for source, path in zip(flat, compile_files(flat, progress=silent), strict=True)}
    return chip, {name: [made[source] for source in found] for name, found in sources.items()}


def exported(path):
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_nothing_is_exported_but_the_c_interface(libraries):
    for library in (library for found in libraries[1].values() for library in found):
        assert exported(library.path) == {library.source.symbol, library.source.workspace_symbol}


def test_the_code_is_for_the_chip(libraries):
    chip, found = libraries
    for library in (library for several in found.values() for library in several):
        # ptxas writes its target into the machine code that it makes.
        assert set(re.findall(rb"\bsm_\d+a?\b", library.path.read_bytes())) == {chip.name.encode()}


def test_arguments_of_another_version_are_refused_before_anything_runs(libraries):
    for library in (library for found in libraries[1].values() for library in found):
        with pytest.raises(BackendError, match=r"the call failed: the library was compiled for other arguments"):
            library.call(Arguments(struct_bytes=8), lambda: "the call")


def test_sizes_that_no_kernel_takes_are_refused_before_anything_runs(libraries):
    product = libraries[1]["linear"][0]
    with pytest.raises(BackendError, match="the kernel does not take these sizes or strides"):
        product.call(Arguments(m=-1, n=8, k=16, lda=16, ldb=16, ldo=8), lambda: "the call")


def test_compiling_ahead_needs_no_gpu_and_names_what_it_refuses(libraries):
    chip, found = libraries
    done = compile_ahead([*PRODUCTS.values(), linear(k=200_000)], chip.name, silent, configs_per_request=1)
    assert done.requests == len(PRODUCTS)
    assert done.kernels == len({library.source for several in found.values() for library in several})
    (refused,) = done.refused
    assert refused[0].compute_capability == f"{chip.capability[0]}.{chip.capability[1]}"
    assert "an int32 sum over 200000 products could overflow" in refused[1][0]
