"""The producers in CUDA C++ on a real GPU, as its own code and as the PTX of sm_75: against float64 and backend aten, in graphs."""

from __future__ import annotations

import random
import subprocess
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("qsync_kernels_cutlass")

from qsync_torch.conformance.test_producer_gradients import check as check_gradients  # noqa: E402
from qsync_torch.conformance.test_producer_gradients import gradient  # noqa: E402

from qsync_core.ir.chain import Activation, ChainForm  # noqa: E402
from qsync_core.ir.precision import Granularity, Precision, Rounding  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op  # noqa: E402
from qsync_core.kernels.support import FUSED_ACTIVATIONS  # noqa: E402
from qsync_core.progress import silent  # noqa: E402
from qsync_kernels_cutlass.architectures import SM_75, architecture_of  # noqa: E402
from qsync_kernels_cutlass.backend import CutlassBackend  # noqa: E402
from qsync_kernels_cutlass.compiling import compile, toolchain  # noqa: E402
from qsync_kernels_cutlass.kernels import producers  # noqa: E402
from qsync_torch.aten.backend import AtenBackend  # noqa: E402
from qsync_torch.conformance.operands import Outputs  # noqa: E402
from qsync_torch.conformance.producer_checks import check_forward  # noqa: E402
from qsync_torch.conformance.producers import BATCH_NORM, EPS, FORMS, Producer, given, variant_of  # noqa: E402
from qsync_torch.conformance.subject import Subject  # noqa: E402
from qsync_torch.devices import compute_capability  # noqa: E402

pytestmark = pytest.mark.gpu

FORMATS = [Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT32]
ROW, TENSOR = Granularity.PER_ROW, Granularity.PER_TENSOR


KEPT = attrs.evolve(Variant.of(Precision.INT8), saved=Precision.FLOAT16)
REQUESTS = [
    KernelRequest(op, KEPT, (), device_kind="cuda", compute_capability="7.5", chain=ChainForm(activation))
    for op in Op.PRODUCERS
    for activation in FUSED_ACTIVATIONS[op]
]
"""One for each library."""


class PtxBackend(CutlassBackend):
    """The code that a T4 would run, which the driver translates for the chip at hand."""

    def __init__(self, folder):
        self._folder = folder
        sources = {producers.producer_source(request, SM_75) for request in REQUESTS}
        with ThreadPoolExecutor(compile.default_jobs()) as pool:
            paths = dict(zip(sources, pool.map(self._as_ptx, sources), strict=True))
        with unittest.mock.patch.object(compile, "compile_files", lambda wanted, **_: [paths[wanted[0]]]):
            self._loaded = {source: compile.compiled(source) for source in sources}

    def build(self, request, config):
        with unittest.mock.patch.object(producers, "compiled", self._loaded.__getitem__):
            return producers.Producer(request, SM_75)

    def _as_ptx(self, source):
        text, output = self._folder / f"{source.name}.cu", self._folder / f"{source.name}.so"
        text.write_text(source.text)
        line = compile.command(source, *toolchain.required(), text, output)
        line = [part.replace("code=sm_75", "code=compute_75") for part in line]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return output


@pytest.fixture(scope="module", params=["the chip's code", "the PTX of sm_75"])
def subject(request, tmp_path_factory):
    device = torch.device("cuda", torch.cuda.current_device())
    if request.param == "the chip's code":
        backend = CutlassBackend()
        arch = architecture_of(compute_capability(device))
        if arch is not None and toolchain.uncompilable_reason(arch.name) is None:
            backend.compile_ahead(REQUESTS, arch.name, silent)  # all at once
        return Subject(backend, device, 1)
    if reason := toolchain.uncompilable_reason("sm_75"):
        pytest.skip(reason)
    return Subject(PtxBackend(tmp_path_factory.mktemp("ptx")), device, 1)


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


@pytest.mark.parametrize("twenty", range(0, 120, 20))
def test_random_shapes_are_right_up_to_float32_arithmetic(subject, outputs, twenty):
    for draw in range(twenty, twenty + 20):
        problem = random_producer(draw, subject.device)
        for kernel in problem.kernels(subject):
            check_forward(problem, problem.run(kernel, outputs))
        check_gradients(subject, outputs, problem, gradient(problem))


@pytest.mark.parametrize("form", FORMS)
def test_copies_are_those_of_pytorchs_own_kernels(subject, outputs, form):
    """One generator of random numbers: all but values that rounding in float32 moves across a threshold are alike."""
    saved = Precision.FLOAT32 if form == "relu" else Precision.INT8
    problem = Producer.of(form, variant_of(saved=saved), (840, 104), subject.device, 31)
    written, expected = (
        problem.run(problem.kernels(one)[0], outputs, 1 << 40, 3 << 50, 5 << 35)
        for one in (subject, attrs.evolve(subject, backend=AtenBackend()))
    )
    torch.testing.assert_close(written.scale, expected.scale, rtol=2**-20, atol=0)
    for one, other in ((written.q, expected.q), (written.x_q, expected.x_q)):
        if one is not None:
            assert (one != given(other)).float().mean().item() < 1e-3


@pytest.mark.parametrize("form", ["batch_norm+add+relu", "add+layer_norm", "gelu_tanh"])
def test_the_same_operands_give_the_same_bits(subject, outputs, form):
    problem = Producer.of(form, variant_of(saved=Precision.INT8, output=Precision.FLOAT16), (12_544, 136), subject.device, 5)
    (forward,), (backward,) = problem.kernels(subject), problem.kernels(subject, "grad_input")
    first, again = (problem.run(forward, outputs) for _ in range(2))
    for one, other in zip(attrs.astuple(first, recurse=False), attrs.astuple(again, recurse=False), strict=True):
        assert one is None or torch.equal(one, given(other))
    kept = (given(first.x_q), first.x_scale, first.mean, first.spread, first.bits)
    gradients = [problem.run_backward(backward, outputs, gradient(problem), *kept) for _ in range(2)]
    for one, other in zip(*(attrs.astuple(found, recurse=False) for found in gradients), strict=True):
        assert one is None or torch.equal(one, given(other))


@pytest.mark.parametrize("form", ["batch_norm+relu", "layer_norm", "silu"])
def test_a_captured_call_computes_anew_and_draws_new_numbers(subject, outputs, form):
    problem = Producer.of(form, variant_of(output=Precision.FLOAT16, saved=Precision.INT8), (784, 192), subject.device, 6)
    (kernel,) = problem.kernels(subject, bare=True)
    counter = torch.zeros(1, dtype=torch.int64, device=subject.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        problem.run(kernel, outputs, offset=counter)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = problem.run(kernel, outputs, offset=counter)
        counter += 1
    problem.x.mul_(1.5)
    copies = []
    for _ in range(2):
        graph.replay()
        copies.append(given(written.q).clone())
    assert (copies[0] != copies[1]).float().mean() > 0.1
    check_forward(problem, written)


def test_more_than_two_to_the_thirty_one_elements(subject):
    shape = (32, 64, 1024, 1026)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(shape, dtype=torch.float16, device=subject.device).to(memory_format=torch.channels_last)
    x[-1, -1, -1, -1], x[-1, -1, -1, -2] = 1000, -500
    mean, var, scale = (torch.empty(count, device=subject.device) for count in (64, 64, 1))
    q = torch.empty_like(x, dtype=torch.int8)
    variant, chain = Variant.of(Precision.INT8, rounding=Rounding.STOCHASTIC), ChainForm(Activation.RELU)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    request = KernelRequest(Op.BATCH_NORM_OUTPUT, variant, (shape,), device_kind="cuda", compute_capability=capability, chain=chain)
    kernel = subject.backend.build(request, KernelConfig())
    kernel(x, None, None, EPS, None, None, mean, var, None, None, q, scale, None, None, None, 1, 2, 3)
    positions = shape[0] * shape[2] * shape[3]
    assert var[-1].item() == pytest.approx(1.25e6 / positions, rel=1e-4)
    assert (q[-1, -1, -1, -1].item(), int(q.count_nonzero())) == (127, 1)
