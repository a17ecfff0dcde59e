"""The producers' kernels, run on a CPU thread by thread: the conformance suite, long rows, the reference's random numbers.

What a chip adds (its memory, its scheduling, nvcc's code) is tested in ``tests/gpu/test_cutlass_producers.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import emulated_producers
import pytest
import torch
from emulated_producers import COMPILER, FOLDER, EmulatedBackend
from kernel_requests import every_producer
from qsync_torch.conformance.test_producer_gradients import check as check_gradients
from qsync_torch.conformance.test_producer_gradients import gradient

from nightly import each_once, in_pairs
from qsync_core.errors import BackendError
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op
from qsync_kernels_cutlass.compiling import library
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.quantize import CENTRE
from qsync_torch.aten.random_bits import random_thresholds, stream_of
from qsync_torch.conformance.operands import Outputs
from qsync_torch.conformance.producer_checks import check_forward
from qsync_torch.conformance.producers import BATCH_NORM, FORMS, Producer, given, variant_of
from qsync_torch.conformance.subject import Subject

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed, so the kernels cannot be run on a CPU")

CPU = torch.device("cpu")
ROW, TENSOR = Granularity.PER_ROW, Granularity.PER_TENSOR
BY_ROW = [form for form, (name, _) in FORMS.items() if name != BATCH_NORM]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """One compilation for this process and the suite's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER, str(tmp_path_factory.mktemp("emulated")))
        emulated_producers.emulated.cache_clear()
        emulated_producers.emulated()
        yield
        emulated_producers.emulated.cache_clear()


@pytest.fixture
def outputs():
    found = Outputs(CPU)
    yield found
    found.check()


def subject():
    return Subject(EmulatedBackend(), CPU, 1)


def test_they_pass_the_conformance_suite(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "qsync_torch.conformance.plugin", "--pyargs", "qsync_torch.conformance"]
    options = ["-k", "producer", "--backend", "emulated_producers:EmulatedBackend", "--device", "cpu"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 400


@in_pairs({"form": ["add+layer_norm", "gelu"], "columns": [1032, 4100, 9003], "granularity": [TENSOR, ROW]})
def test_rows_of_several_warps_and_rows_that_no_block_holds(outputs, form, columns, granularity):
    for saved in (Precision.INT8, Precision.FLOAT16):
        variant = variant_of(saved=saved, output=Precision.FLOAT16, granularity=granularity)
        problem = Producer.of(form, variant, (5, columns), CPU, columns)
        for kernel in problem.kernels(subject()):
            check_forward(problem, problem.run(kernel, outputs))
        check_gradients(subject(), outputs, problem, gradient(problem))


@each_once({"form": FORMS, "rounding": [Rounding.STOCHASTIC, Rounding.NEAREST]})
def test_copies_are_those_of_the_reference(outputs, form, rounding):
    """The same random numbers: but for values that float32's rounding moves across a threshold, bit for bit.

    Of rows with a scale each the reference draws from the stream of all of x, and these kernels from that of the row.
    """
    granularity = ROW if form in BY_ROW and rounding is Rounding.NEAREST else TENSOR
    saved = Precision.FLOAT32 if form == "relu" else Precision.INT8
    for shape in ((120, 40), (60, 37)):
        problem = Producer.of(form, variant_of(saved=saved, granularity=granularity, rounding=rounding), shape, CPU, 21)
        written, expected = (
            problem.run(problem.kernels(Subject(backend, CPU, 1))[0], outputs, 1 << 40, 3 << 50, 5 << 35)
            for backend in (EmulatedBackend(), AtenBackend())
        )
        assert torch.equal(given(written.stream), given(expected.stream))
        by_row = form in BY_ROW and rounding is Rounding.STOCHASTIC
        for one, other in ((written.q, expected.q), (written.x_q, None if by_row else expected.x_q)):
            if one is not None and other is not None:
                assert int((one != given(other)).sum()) <= 2, f"{int((one != other).sum())} of {one.numel()} differ"
        torch.testing.assert_close(written.scale, expected.scale, rtol=2**-20, atol=0)


@pytest.mark.parametrize("form", ["add+layer_norm", "gelu"])
def test_rows_with_a_scale_each_take_the_stream_of_their_own_checksum(outputs, form):
    """Number i of the row's stream goes to element i of the matrix; the streams of rows add up to that of the matrix."""
    seed, x_seed, offset = 1 << 40, 3 << 50, 5 << 35
    for shape in ((60, 37), (7, 1032)):
        problem = Producer.of(form, variant_of(saved=Precision.INT8, granularity=ROW), shape, CPU, 21)
        written = problem.run(problem.kernels(subject())[0], outputs, seed, x_seed, offset)
        rows = range(shape[0])
        streams = [int(stream_of(offset, problem.x[row])) for row in rows]
        for q, scale, values, of in (
            (written.q, written.scale, given(written.out), seed),
            (written.x_q, written.x_scale, problem.expected(written).xhat.float(), x_seed),
        ):
            drawn = [
                random_thresholds(values.numel(), of, stream).view(shape)[row] for row, stream in zip(rows, streams, strict=True)
            ]
            steps = values * scale.reciprocal()[:, None]
            expected = (steps + (torch.stack(drawn) / 256 + CENTRE)).floor()
            assert int((expected != q).sum()) <= 4, f"{int((expected != q).sum())} of {q.numel()} differ"


IMAGES = (2, 8, 3, 3)


def images(dtype=torch.float32):
    return torch.ones(IMAGES).to(dtype).contiguous(memory_format=torch.channels_last)


def vector(count=8):
    return torch.ones(count)


def forward(**changes):
    operands = {
        "x": images(), "weight": None, "bias": None, "eps": 1e-5, "residual": None, "residual_absmax": None, "mean": vector(),
        "var": vector(), "out": images(), "absmax": None, "q": None, "scale": None, "stream": None, "x_q": None, "x_scale": None,
        "open": None,
        "seed": 1, "x_seed": 2, "offset": 3,
    }  # fmt: skip
    return "batch_norm.output", (operands | changes).values()


def backward(**changes):
    operands = {
        "grad": images(), "x": images(), "x_scale": None, "mean": vector(), "var": vector(), "weight": None, "bias": None,
        "eps": 1e-5, "open": None, "grad_input": images(), "grad_residual": None, "grad_weight": None, "grad_bias": None,
    }  # fmt: skip
    return "batch_norm.grad_input", (operands | changes).values()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (forward(x=torch.ones(4, 8)), r"x must be \(B, C, H, W\), got shape \(4, 8\)"),
        (forward(x=images(torch.float64)), r"x must be float32 or float16 or bfloat16 of shape \(2, 8, 3, 3\), got torch.float64"),
        (forward(weight=vector(7)), r"weight must be 8 float32, got torch.float32 \(7,\)"),
        (forward(mean=None), "mean_out is needed, got None"),
        (forward(out=torch.ones(IMAGES)), "out must be channels-last"),
        (forward(q=images(torch.int8)), "q_out and scale_out come together, and one of them is None"),
        (forward(q=images(torch.uint8), scale=vector(1)), "q_out must be int8 of shape"),
        (forward(q=images(torch.int8), scale=vector(1), residual=images()), "residual_absmax is needed beside a residual"),
        (forward(offset=torch.ones(1)), r"offset must be 1 int64, got torch.float32"),
        (forward(open=torch.ones(2, 3, 3, 2, dtype=torch.uint8)), r"open_out must be uint8 of shape \(2, 3, 3, 1\)"),
        (backward(x=images(torch.int8), open=torch.ones(2, 3, 3, 1, dtype=torch.uint8)), "x_scale goes with an x of 8 bit"),
        (backward(x=images(torch.int8), x_scale=vector()), "open is needed for a ReLU behind a residual, or of an 8-bit x"),
        (backward(grad_residual=images(torch.float16)), "grad_input_out and grad_residual_out have one format"),
        (backward(grad=torch.ones(IMAGES, device="meta")), "grad is on meta, and x on cpu"),
    ],
)
def test_operands_that_do_not_fit_are_refused_in_a_sentence(call, said):
    op, operands = call
    request = KernelRequest(op, Variant.of(Precision.INT8), (IMAGES,), chain=ChainForm(Activation.RELU))
    with pytest.raises(BackendError, match=f"backend cutlass cannot run {op}: .*{said}"):
        EmulatedBackend().build(request, KernelConfig())(*operands)


def test_calls_that_no_kernel_takes_are_refused_before_anything_runs():
    kernel = EmulatedBackend().compiled(emulated_producers.producer_source(every_producer()[0], emulated_producers.SM_75))
    with pytest.raises(BackendError, match="compiled for other arguments"):
        kernel.call(library.ProducerArguments(struct_bytes=8), lambda: "the call")
    with pytest.raises(BackendError, match="does not take these sizes"):
        kernel.call(library.ProducerArguments(rows=-1, columns=8, sm_count=1), lambda: "the call")
    with pytest.raises(BackendError, match="does not take these sizes"):
        kernel.workspace_bytes(library.ProducerArguments(rows=8, columns=2**31, sm_count=1), lambda: "the call")
    with pytest.raises(BackendError, match="workspace is missing or too small"):
        kernel.call(library.ProducerArguments(rows=8, columns=8, sm_count=1), lambda: "the call")


def test_the_first_configuration_is_the_only_one(stand_in_nvcc):
    stand_in_nvcc("exit 1")
    request = attrs.evolve(every_producer()[0], op=Op.LAYER_NORM_OUTPUT)
    with pytest.raises(BackendError, match=r"backend cutlass has no configuration 'tile=4' of layer_norm\.output"):
        emulated_producers.CutlassBackend().build(attrs.evolve(request, chain=ChainForm()), KernelConfig("tile=4"))
