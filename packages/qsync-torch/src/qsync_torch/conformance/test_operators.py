"""Every operator of the table: its values, and everything else that any kernel must keep to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import pytest
import torch

from qsync_core.errors import NumericsError
from qsync_torch.conformance.calls import Call, Case, Written, when
from qsync_torch.conformance.operands import LAYOUTS, STRIDES_OF_ONES, Outputs, between_others, laid_out, with_ones_of_stride
from qsync_torch.conformance.subject import Kernel, Subject, check_sentences
from qsync_torch.conformance.table import TABLE
from qsync_torch.torch_internals import occupy_stream

HIGH_BITS = (0, 31, 32, 47, 62)
Put = Callable[[Callable[..., None]], Callable[..., None]]


def to_each(kind: str) -> Put:
    """Put a test to all cases of a kind, of all operators."""
    cases: Iterable[Case] = itertools.chain.from_iterable(getattr(entry, kind) for entry in TABLE.values())
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


@to_each("values")
def test_values(subject: Subject, outputs: Outputs, case: Case) -> None:
    """Everything that a kernel writes is what float64 says, up to the errors of its arithmetic."""
    case.call(subject).put_to(subject, outputs)


def change(x: torch.Tensor) -> None:
    """Give a tensor other numbers, of which sums stay exact: integers of another sign, float numbers twice as large.

    Its version stays what it is, as where a kernel of no library writes, or where another tensor gets the same memory.
    """
    x = x.data
    if x.dtype is torch.int8:
        x.neg_()
    elif x.dtype is torch.uint8:
        x.bitwise_not_()
    else:
        x.mul_(-2.0 if bool((x < 0).any()) else 2.0)


def after_each_change(call: Call) -> Iterator[str]:
    """Once as they are, then with each operand changed in place, the others as they were; says which one that is."""
    yield "as it was first"
    for name, operand in call.operands.items():
        if operand.numel():
            kept = operand.clone()
            change(operand)
            yield f"after {name} was changed in place"
            operand.data.copy_(kept)


@to_each("typical")
def test_operands_that_were_changed_in_place(subject: Subject, outputs: Outputs, case: Case) -> None:
    """Nothing may be kept by a tensor's address.

    The optimizer changes weights where they are, and the allocator hands freed memory to the next tensor: an address says nothing
    of the numbers there.  Outputs are those of the first call, too.
    """
    call = case.call(subject)
    for kernel in call.kernels(subject):
        written = call.allocate(outputs)
        for circumstance in after_each_change(call):
            with when(circumstance):
                call.launch(kernel, written)
                call.check(written)


@to_each("typical")
def test_operands_of_any_strides(subject: Subject, outputs: Outputs, case: Case) -> None:
    """Callers hand out transposed views and parts of larger tensors, and a column of a parameter is a bias too."""
    call = case.call(subject)
    kernels = call.kernels(subject)
    free = {name: x for name, x in call.operands.items() if name in call.asked.any_strides}
    matrices = {name: x for name, x in free.items() if x.dim() == 2}
    strided = [{name: between_others(x)} for name, x in free.items() if x.dim() == 1 and x.numel() > 1]
    for layouts in itertools.product(LAYOUTS, repeat=len(matrices)) if matrices else ():
        strided.append({name: laid_out(x, layout) for (name, x), layout in zip(matrices.items(), layouts, strict=True)})
    for kernel, changes in itertools.product(kernels, strided):
        with when("with " + ", ".join(f"{name} of strides {x.stride()}" for name, x in changes.items())):
            moved = call.changed(**changes)
            moved.check(moved.run(kernel, outputs))


@to_each("ones")
def test_dimensions_of_size_one(subject: Subject, outputs: Outputs, case: Case) -> None:
    """One row, column, channel or image: its stride counts for nothing, and may be anything.

    A tensor passes for contiguous then, so that ``contiguous()`` leaves the stride to a library that takes it for a row's length.
    """
    call = case.call(subject)
    first, *others = call.kernels(subject)
    for kernel in (first, *others):
        call.check(call.run(kernel, outputs))
    ones = {name: x for name, x in call.operands.items() if 1 in x.shape}
    assert ones, f"{case.name} has no dimension of size 1"
    strided = [{name: with_ones_of_stride(x, stride) for name, x in ones.items()} for stride in STRIDES_OF_ONES]
    matrices = {name: x for name, x in call.operands.items() if name in call.asked.any_strides and x.dim() == 2}
    strided += [{name: laid_out(x, layout) for name, x in matrices.items()} for layout in LAYOUTS[1:] if matrices]
    for changes in strided:
        moved = call.changed(**changes)
        moved.check(moved.run(first, outputs))


def edges(count: int) -> list[int]:
    """The first two and last two of so many elements, and those around powers of two, where a block may end."""
    around = {(1 << bit) + side for bit in range(3, count.bit_length()) for side in (-1, 0)}
    return sorted({0, 1, count - 2, count - 1, *around} & set(range(count)))


def places(x: torch.Tensor) -> list[int]:
    """Edges of the memory, of the first and the last row in it, and of the rows' first and last elements."""
    columns = x.shape[-1] if x.is_contiguous() else x.shape[1] if x.dim() == 4 else x.shape[0]
    rows = x.numel() // columns
    along = [columns * row + column for row in (0, rows - 1) for column in edges(columns)]
    across = [columns * row + column for row in edges(rows) for column in (0, columns - 1)]
    return sorted({*edges(x.numel()), *along, *across})


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in their order in memory."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


EDGES = [edge for entry in TABLE.values() for edge in entry.edges]


def params(found: Iterable[tuple[Case, str, float]]) -> list[Any]:
    """Edges by the names of their cases."""
    return [pytest.param(*edge, id=edge[0].name) for edge in found]


@pytest.mark.parametrize("case, operand, largest", params(EDGES))
def test_the_largest_value_at_every_edge(subject: Subject, outputs: Outputs, case: Case, operand: str, largest: float) -> None:
    """A maximum that leaves out a tail gives a scale that clips; random numbers hardly ever have their largest one there."""
    call = case.call(subject)
    x = call.operands[operand]
    memory = memory_of(x)
    for kernel in call.kernels(subject):
        for place in places(x):
            kept = memory[place].item()
            memory[place] = largest
            with when(f"with the largest value at element {place} in the memory of {list(x.shape)}"):
                call.check(call.run(kernel, outputs))
            memory[place] = kept


@pytest.mark.parametrize("case, operand, largest", params(edge for edge in EDGES if edge[1] == "x"))
def test_numbers_that_have_no_copy_show(subject: Subject, outputs: Outputs, case: Case, operand: str, largest: float) -> None:
    """NaN or infinity raises an error that says so on a CPU; on a GPU that, or it gives a scale that carries the damage on."""
    for value, place in itertools.product((math.nan, math.copysign(math.inf, largest)), (0, -1)):
        call = case.call(subject)
        kernels = call.kernels(subject)
        memory_of(call.operands[operand])[place] = value
        for kernel in kernels:
            try:
                scale = call.run(kernel, outputs)["scale"]
            except NumericsError:
                continue
            assert not torch.isfinite(scale).all(), f"a tensor with {value} got the scale {scale.tolist()[:4]}"
            assert subject.device.type != "cpu", (
                f"a tensor with {value} got the scale {scale.tolist()[:4]}, and no NumericsError on a CPU"
            )


def copies_of(call: Call, kernel: Kernel, outputs: Outputs, **numbers: int | torch.Tensor) -> dict[str, torch.Tensor]:
    """All outputs that are rounded stochastically."""
    written = call.run(kernel, outputs, **numbers)
    return {name: written[name] for name in dict.fromkeys(itertools.chain.from_iterable(call.asked.draws.values()))}


@to_each("drawn")
def test_draws_follow_from_their_numbers(subject: Subject, outputs: Outputs, case: Case) -> None:
    """The same numbers and data give the same bits; each bit of a number counts for the copies that are drawn by it, alone."""
    call = case.call(subject)
    first: dict[str, torch.Tensor] = {}
    for position, kernel in enumerate(call.kernels(subject)):
        expected = copies_of(call, kernel, outputs)
        again = copies_of(call, kernel, outputs)
        assert all(torch.equal(again[name], q) for name, q in expected.items()), "the same numbers gave other bits the second time"
        first = first or expected
        if call.asked.configurations_agree:
            assert all(torch.equal(first[name], q) for name, q in expected.items()), "configurations draw differently"
        seen = {name: {bytes_of(q): "no bit changed"} for name, q in expected.items()}
        for number, drawn in call.asked.draws.items():
            if not call.asked.configurations_agree:
                seen = {name: {bytes_of(q): "no bit changed"} for name, q in expected.items()}
            for bit in range(63) if call.asked.configurations_agree and not position else HIGH_BITS:
                found = copies_of(call, kernel, outputs, **{number: getattr(call, number) ^ (1 << bit)})
                for name, q in found.items():
                    where = f"bit {bit} of {number}"
                    if name not in drawn:
                        assert torch.equal(q, expected[name]), f"{where} changed {name}, which is drawn by other numbers"
                        continue
                    same = seen[name].setdefault(bytes_of(q), where)
                    assert same == where, f"{where} does not count: {name} is the same with {same}"


def bytes_of(q: torch.Tensor) -> bytes:
    """All bits of a copy."""
    return bytes(q.cpu().contiguous().view(torch.uint8).flatten().tolist())


@to_each("drawn")
def test_an_offset_in_a_tensor_gives_the_bits_of_the_number(subject: Subject, outputs: Outputs, case: Case) -> None:
    """``offset_tensors``: one int64 on the operands' device, whose number counts when the kernel runs."""
    subject.skip_unless_offset_tensors()
    call = case.call(subject)
    tensor = torch.zeros(1, dtype=torch.int64, device=subject.device)
    for kernel in call.kernels(subject):
        for number in (2, 2 + (1 << 40), (1 << 63) - 1):
            expected = copies_of(call, kernel, outputs, offset=number)
            found = copies_of(call, kernel, outputs, offset=tensor.fill_(number))
            assert all(torch.equal(found[name], q) for name, q in expected.items()), (
                f"the offset {number} gave other bits in a tensor"
            )


@pytest.mark.parametrize(
    "op, what", [pytest.param(op, what, id=f"{op}, {what}") for op, entry in TABLE.items() for what in entry.impossible]
)
def test_what_no_kernel_can_compute_is_refused(subject: Subject, op: str, what: str) -> None:
    """A sum that could overflow has a reason against it, and so has a zero point that no kernel would be told."""
    subject.skip_unless_offered(op)
    variant, shapes = TABLE[op].impossible[what]
    reasons = subject.backend.unsupported_reasons(subject.request(op, variant, shapes))
    check_sentences(reasons)
    assert reasons, f"it has no reason against {what} in {op}"


def on_cuda(subject: Subject, case: Case) -> tuple[Call, list[Kernel]]:
    """A call and its kernels, if they run on a CUDA device."""
    if subject.device.type != "cuda":
        pytest.skip("streams and graphs are CUDA's")
    call = case.call(subject)
    return call, call.kernels(subject)


@to_each("typical")
def test_kernels_run_on_the_current_stream(subject: Subject, outputs: Outputs, case: Case) -> None:
    """Inputs that the same stream fills only after a long wait must be seen; another stream's order does not count."""
    call, kernels = on_cuda(subject, case)
    for kernel in kernels:
        written = call.run(kernel, outputs)  # whatever is set up on first use
        signs = {name: -2.0 if bool((x < 0).any()) else 2.0 for name, x in call.operands.items() if x.dtype.is_floating_point}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            occupy_stream(50_000_000)
            for name, x in call.operands.items():
                x.mul_(signs[name]) if name in signs else change(x)
            call.launch(kernel, written, watched=False)
        stream.synchronize()
        with when("after operands that the kernel's own stream wrote late"):
            call.check(written)


def captured(call: Call, kernel: Kernel, written: Written) -> torch.cuda.CUDAGraph:
    """A call as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.launch(kernel, written, watched=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.launch(kernel, written, watched=False)
    return graph


@to_each("typical")
def test_kernels_can_be_captured(subject: Subject, outputs: Outputs, case: Case) -> None:
    """A captured call is replayed on new inputs: no host synchronisation, no memory that is gone by then."""
    call, kernels = on_cuda(subject, case)
    for kernel in kernels:
        written = call.allocate(outputs)
        graph = captured(call, kernel, written)
        for circumstance in after_each_change(call):
            graph.replay()
            torch.cuda.synchronize()
            with when(f"replayed {circumstance}"):
                call.check(written)


@to_each("drawn")
def test_a_replay_rounds_with_the_offset_of_its_time(subject: Subject, outputs: Outputs, case: Case) -> None:
    """``offset_tensors``: what the tensor holds when the graph is replayed counts, and not what it held when it was captured."""
    subject.skip_unless_offset_tensors()
    call, kernels = on_cuda(subject, case)
    offset = torch.zeros(1, dtype=torch.int64, device=subject.device)
    call = call.changed(offset=offset)
    for kernel in kernels:
        written = call.allocate(outputs)
        graph, found = captured(call, kernel, written), []
        for number in (1 << 33, 7):
            offset.fill_(number)
            graph.replay()
            call.check(written)
            found.append({name: written[name].clone() for name in call.asked.draws["offset"]})
            expected = copies_of(call, kernel, outputs, offset=number)
            for name, q in found[-1].items():
                assert torch.equal(q, expected[name]), f"the replay with the offset {number} has other bits than a call with it"
        for name, q in found[0].items():
            assert not torch.equal(q, found[1][name]), "two replays drew the same numbers"


@to_each("typical")
def test_kernels_run_where_their_operands_are(subject: Subject, case: Case) -> None:
    """The current device may be another one."""
    if subject.device.type != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1 - (subject.device.index or 0))
    case.draw(other).put_to(attrs.evolve(subject, device=other), Outputs(other))
