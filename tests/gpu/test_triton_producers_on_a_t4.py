"""Triton's producers as the PTX that a T4's code is made of, assembled for the GPU at hand: against float64."""

from __future__ import annotations

import contextlib
import importlib
import random
import unittest.mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("qsync_kernels_triton")

from qsync_core.ir.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_kernels_triton.backend import TritonBackend  # noqa: E402
from qsync_torch.conformance.operands import Outputs  # noqa: E402
from qsync_torch.conformance.producers import BATCH_NORM, FORMS, Producer, variant_of  # noqa: E402
from qsync_torch.conformance.subject import Subject  # noqa: E402

pytestmark = pytest.mark.gpu

FORMATS = [Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT32]
ROW, TENSOR = Granularity.PER_ROW, Granularity.PER_TENSOR
T4 = 75
MODULES = ("activation", "batch_norm", "batch_norm_gradient", "layer_norm", "layer_norm_gradient", "sums")


def compiled_producers():
    """What Triton keeps of every kernel that a producer launches, by device."""
    modules = (importlib.import_module(f"qsync_kernels_triton.producers.{name}") for name in MODULES)
    return [kernel.device_caches for module in modules for kernel in vars(module).values() if hasattr(kernel, "device_caches")]


@contextlib.contextmanager
def compiled_for_a_t4(folder):
    """Triton lowers its kernels to the PTX that a T4's code is made of, and assembles that for the chip at hand."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    assemble, (major, minor) = CUDABackend.make_cubin, torch.cuda.get_device_capability()

    def assembled_for_here(self, ptx, metadata, options, capability):
        assert (capability, f".target sm_{T4}" in ptx) == (T4, True)
        return assemble(self, ptx, metadata, options, 10 * major + minor)

    patch = unittest.mock.patch
    for cache in compiled_producers():
        cache.clear()
    with (
        patch.object(driver.active, "get_current_target", lambda: GPUTarget("cuda", T4, 32)),
        patch.object(CUDABackend, "make_cubin", assembled_for_here),
        patch.dict("os.environ", TRITON_CACHE_DIR=str(folder)),
    ):
        yield
    for cache in compiled_producers():
        cache.clear()


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    found = Subject(TritonBackend(), torch.device("cuda", torch.cuda.current_device()), 1)
    with compiled_for_a_t4(tmp_path_factory.mktemp("triton")):
        yield found
        kernels = [kernel for cache in compiled_producers() for by_key, *_ in cache.values() for kernel in by_key.values()]
        assert {kernel.asm["ptx"].partition(".target ")[2][:5] for kernel in kernels} == {f"sm_{T4}"}


@pytest.fixture
def outputs(subject):
    found = Outputs(subject.device)
    yield found
    found.check()


def random_producer(draw, device):
    choose = random.Random(draw)
    form, output = choose.choice(list(FORMS)), choose.choice(FORMATS)
    is_image = FORMS[form][0] == BATCH_NORM
    columns = choose.choice([3, 8, 24, 64, 97, 256, 320, 768, 1000, 2048] + ([] if is_image else [3072, 4100, 8192, 9001]))
    rows = choose.choice([2, 49, 1568, 12_544] if is_image else [1, 33, 384, 1001])
    saved = Precision.INT8 if form != "relu" and choose.random() < 0.5 else output
    granularity = TENSOR if is_image else choose.choice([ROW, TENSOR])
    variant = variant_of(saved=saved, output=output, granularity=granularity, rounding=choose.choice(list(Rounding)))
    return Producer.of(form, variant, (rows, columns), device, draw, mean=choose.choice([0.0, 4.0]))


@pytest.mark.parametrize("ten", range(0, 40, 10))
def test_random_shapes_are_right_up_to_float32_arithmetic(subject, outputs, ten):
    for draw in range(ten, ten + 10):
        problem = random_producer(draw, subject.device)
        problem.put_to(subject, outputs)
        problem.backward().put_to(subject, outputs)


@pytest.mark.parametrize("form", ["batch_norm+add+relu", "add+layer_norm", "gelu_tanh"])
def test_the_same_operands_give_the_same_bits(subject, outputs, form):
    problem = Producer.of(form, variant_of(saved=Precision.INT8, output=Precision.FLOAT16), (12_544, 136), subject.device, 5)
    for call in (problem, problem.backward()):
        (kernel,) = call.kernels(subject)
        first, again = (call.run(kernel, outputs) for _ in range(2))
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)
