"""Tests on CUDA devices: the current stream, captured graphs, and other devices than the first."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch

from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_torch.conformance.operands import integers
from qsync_torch.conformance.subject import Kernel, Subject
from qsync_torch.conformance.test_quantize import check_stream, variant_of

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32)
BOTH = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
SIZE = 256
CASES = {
    "quantize": (Op.QUANTIZE, variant_of(Rounding.NEAREST), ((SIZE, SIZE),)),
    "quantize, affine": (Op.QUANTIZE, attrs.evolve(variant_of(Rounding.NEAREST), symmetric=False), ((SIZE, SIZE),)),
    "linear.output": (Op.LINEAR_OUTPUT, INT8, ((SIZE, SIZE), (SIZE, SIZE))),
    "linear.output, affine": (Op.LINEAR_OUTPUT, attrs.evolve(INT8, symmetric=False), ((SIZE, SIZE), (SIZE, SIZE))),
    "linear.grad_input": (Op.LINEAR_GRAD_INPUT, BOTH, ((SIZE, SIZE), (SIZE, SIZE))),
    "linear.grad_weight": (Op.LINEAR_GRAD_WEIGHT, BOTH, ((SIZE, SIZE), (SIZE, SIZE))),
}
ZERO_POINT = -3


def call_of(case: str, device: torch.device) -> tuple[Callable[[Kernel], None], Callable[[int], None], Callable[[], torch.Tensor]]:
    """How to call a kernel on fixed buffers, how to fill the inputs from a seed, and what it should have written by then."""
    op, variant, _ = CASES[case]
    a, b = (torch.zeros(SIZE, SIZE, dtype=torch.int8, device=device) for _ in range(2))
    one, ones = torch.ones(1, device=device), torch.ones(SIZE, device=device)
    x_scale = one if variant.symmetric else torch.tensor([1.0, ZERO_POINT], device=device)
    out = torch.zeros(SIZE, SIZE, device=device)
    x, q, scale = torch.zeros(SIZE, SIZE, device=device), torch.zeros_like(a), torch.zeros_like(x_scale)

    def fill(seed: int) -> None:
        a.copy_(integers((SIZE, SIZE), device, seed))
        b.copy_(integers((SIZE, SIZE), device, seed + 1))
        x.copy_(a)

    def call(kernel: Kernel) -> None:
        if op == Op.QUANTIZE:
            kernel(x, q, scale, None, 0, 0)
        elif op == Op.LINEAR_OUTPUT:
            kernel(a, x_scale, b, ones, None, out)
        else:
            kernel(a, b, one, out)

    def error() -> torch.Tensor:
        if op == Op.QUANTIZE:
            zero_point = 0 if variant.symmetric else scale[1].double()
            return (scale[0] * (q.double() - zero_point) - a.double()).abs().max()
        left = a.double().t() if op == Op.LINEAR_GRAD_WEIGHT else a.double()
        left = left if variant.symmetric else left - ZERO_POINT
        right = b.double().t() if op == Op.LINEAR_OUTPUT else b.double()
        return (out.double() - (left @ right).float().double()).abs().max()

    return call, fill, error


def kernels(subject: Subject, case: str) -> list[Kernel]:
    """Kernels of a case, where there is a CUDA device and the backend offers the operator."""
    if subject.device.type != "cuda":
        pytest.skip("streams and graphs are CUDA's")
    op, variant, shapes = CASES[case]
    return subject.bare_kernels(op, variant, shapes)


@pytest.mark.parametrize("case", CASES)
def test_kernels_run_on_the_current_stream(subject: Subject, case: str) -> None:
    """Inputs that the same stream fills only after a long wait must be seen; another stream's order does not count."""
    for kernel in kernels(subject, case):
        call, fill, error = call_of(case, subject.device)
        fill(1)
        call(kernel)  # whatever is set up on first use
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            fill(2)
            call(kernel)
        stream.synchronize()
        assert error().item() == 0, "the kernel did not wait for what its stream did before"


@pytest.mark.parametrize("case", CASES)
def test_kernels_can_be_captured(subject: Subject, case: str) -> None:
    """A captured call is replayed on new inputs: no host synchronisation, no memory that is gone by then."""
    for kernel in kernels(subject, case):
        call, fill, error = call_of(case, subject.device)
        fill(1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(kernel)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(kernel)
        for seed in (3, 5):
            fill(seed)
            graph.replay()
            torch.cuda.synchronize()
            assert error().item() == 0, "the replayed kernel did not compute with the new inputs"


def test_a_replay_rounds_with_the_offset_of_its_time(subject: Subject) -> None:
    """``offset_tensors``: what the tensor holds when the graph is replayed counts, and not what it held when it was captured."""
    subject.skip_unless_offset_tensors()
    if subject.device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    x = torch.randn(SIZE, SIZE, device=subject.device)
    q, scale = torch.zeros(SIZE, SIZE, dtype=torch.int8, device=subject.device), torch.zeros(1, device=subject.device)
    offset, streams = (torch.zeros(1, dtype=torch.int64, device=subject.device) for _ in range(2))
    for kernel in subject.bare_kernels(Op.QUANTIZE, variant_of(Rounding.STOCHASTIC), ((SIZE, SIZE),)):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            kernel(x, q, scale, streams, 3, offset)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(x, q, scale, streams, 3, offset)
        found = []
        for number in (1 << 33, 7):
            offset.fill_(number)
            graph.replay()
            found.append(q.clone())
            check_stream(streams, number, x)
            kernel(x, q, scale, streams, 3, number)
            assert torch.equal(found[-1], q), f"the replay with the offset {number} has other bits than a call with it"
        assert not torch.equal(*found), "two replays drew the same numbers"


@pytest.mark.parametrize("case", CASES)
def test_kernels_run_where_their_operands_are(subject: Subject, case: str) -> None:
    """The current device may be another one."""
    if subject.device.type != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1 - (subject.device.index or 0))
    for kernel in kernels(attrs.evolve(subject, device=other), case):
        call, fill, error = call_of(case, other)
        fill(1)
        call(kernel)
        assert error().item() == 0
