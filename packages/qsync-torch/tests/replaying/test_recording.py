"""What a function does is recorded as a program, here run by a double in Python; what a program cannot hold is refused."""

import ctypes
from contextlib import contextmanager

import pytest
import torch

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kernels.launches import HERE, Stream
from qsync_torch.aten.random_bits import as_kernels_take
from qsync_torch.kernels.binding import quantization_of
from qsync_torch.kernels.library_ops import is_plain, quantize
from qsync_torch.replaying import recording
from qsync_torch.replaying.recording import recorded


class Program:
    """Runs what the extension runs, one step after another."""

    def __init__(self):
        self.steps, self.outputs, self.slots = [], [], 0

    def allocate(self, out, sizes, strides, like):
        self.steps.append(lambda s: s.__setitem__(out, torch.empty_strided(sizes, strides, dtype=like.dtype)))

    def view(self, out, source, sizes, strides, offset):
        self.steps.append(lambda s: s.__setitem__(out, s[source].as_strided(sizes, strides, s[source].storage_offset() + offset)))

    def op(self, name, overload, constants, tensors, outs):
        operator = getattr(getattr(torch.ops.aten, name.partition("::")[2]), overload or "default")

        def run(slots):
            given = constants | {place: slots[slot] for place, slot in tensors}
            args = [given[str(place)] for place in range(sum(key.isdigit() for key in given))]
            result = operator(*args, **{key: value for key, value in given.items() if not key.isdigit()})
            for out, x in zip(outs, result if isinstance(result, tuple) else (result,), strict=True):
                if out >= 0:
                    slots[out] = x

        self.steps.append(run)

    def call(self, function, given, addresses, tensors, stream, read):
        def run(slots):
            own = list(given)
            for place, slot, offset in addresses:
                own[place] = slots[slot].data_ptr() + offset
            for place, slot in tensors:
                own[place] = slots[slot]
            if stream >= 0:
                own[stream] = read(0)
            function(*own)

        self.steps.append(run)

    def run(self, inputs):
        slots = [*inputs, *[None] * (self.slots - len(inputs))]
        for step in self.steps:
            step(slots)
        return [None if slot < 0 else slots[slot] for slot in self.outputs]


def doubled(stream, source, target, count):
    """A kernel of addresses: it writes twice what it reads."""
    assert stream == 7
    read, written = ((ctypes.c_float * count).from_address(address) for address in (source, target))
    for place in range(count):
        written[place] = 2 * read[place]


def launch(x, out):
    doubled(7, x.data_ptr(), out.data_ptr(), x.numel())
    if HERE.recorder is not None:
        HERE.recorder.launched(doubled, (Stream(lambda device: 7),), [x.data_ptr(), out.data_ptr()], (x.numel(),))


def of_views(x, y):
    out = x.new_empty(2, 3, 4)
    launch(x, out.view(6, 4))
    out[1].fill_(5.0)
    return out, out.transpose(0, 1), None


def of_operators(x, y):
    wide = torch.zeros(6, 8, dtype=torch.float32)
    torch.mm(x, y, out=wide)
    return wide.to(torch.bfloat16), wide.sum(0, keepdim=True), x


def of_parts(x, y):
    out = torch.empty_like(x)
    launch(x[2:4], out[1:3])
    return out[1:3].contiguous(), out.narrow(0, 1, 2), torch.empty(0)


@pytest.mark.parametrize("function", [of_views, of_operators, of_parts])
def test_a_program_does_with_other_numbers_what_the_function_does(function):
    def operands():
        return torch.randn(6, 4), torch.randn(4, 8)

    program = recorded(Program, function, operands())
    given = operands()
    for expected, found in zip(function(*given), program.run(given), strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            assert (expected.stride(), expected.dtype) == (found.stride(), found.dtype)
            assert torch.equal(expected, found)
    assert HERE.recorder is None


def of_numbers(x, y):
    return (x * float(y.sum()),)


def of_lists(x, y):
    return (x.split(2)[0],)


def of_memory_elsewhere(x, y, kept=torch.ones(6, 4)):  # noqa: B008
    return (x + kept,)


@pytest.mark.parametrize("function", [of_numbers, of_lists, of_memory_elsewhere])
def test_what_depends_on_more_than_shapes_is_left_to_python(function):
    assert recorded(Program, function, (torch.randn(6, 4), torch.randn(4, 8))) is None


def test_operands_that_share_memory_are_left_to_python():
    x = torch.randn(8, 4)
    assert recorded(Program, lambda x, y: (x + y,), (x[:6], x[2:])) is None
    assert recorded(Program, lambda x, y: (x + y,), (x[:4], x[4:])) is not None


class Full(Program):
    def run(self, inputs):
        raise torch.OutOfMemoryError


def of_much_memory(x, y):
    if HERE.recorder is not None:
        raise torch.OutOfMemoryError
    return (x + 1,)


@pytest.mark.parametrize(("program", "function"), [(Full, of_operators), (Program, of_much_memory)])
def test_a_call_that_does_not_fit_into_memory_twice_is_left_to_python(program, function):
    assert recorded(program, function, (torch.randn(6, 4), torch.randn(4, 8))) is None
    assert HERE.recorder is None


def test_kernels_that_tell_of_no_launches_are_left_to_python():
    quantization = quantization_of(Precision.INT8, Granularity.PER_TENSOR, Rounding.NEAREST, KernelChoice(("aten",)))
    assert recorded(Program, lambda x: quantize(x, quantization, 0, 0), (torch.randn(6, 4),)) is None


@contextmanager
def recording_nothing():
    HERE.recorder = object()
    try:
        yield
    finally:
        HERE.recorder = None


def test_a_recorded_call_is_plain_and_reads_the_offset_where_it_lies():
    offset = torch.tensor(3)
    assert as_kernels_take(offset) == 3
    with recording_nothing():
        assert as_kernels_take(offset) is offset
        assert is_plain(torch.ones(2))


def test_other_bits_than_python_s_are_noticed_unless_it_gives_others_each_time():
    x = torch.tensor([float("nan"), -0.0, 2.0])
    assert recording._does_the_same([x, None], [x.clone(), None], again=None)
    y = torch.randn(50)
    near = y * (1 + 1e-6)
    assert recording._does_the_same([near], [y], lambda: [y * (1 - 1e-6)])
    overflowed, other = (torch.cat([one, torch.tensor([float("inf"), float("nan")])]) for one in (near, y))
    assert recording._does_the_same([overflowed], [other], lambda: [overflowed])
    for replayed, again in ((near, y), (y + 1, near)):
        with pytest.warns(UserWarning, match="other bits than Python's"):
            assert not recording._does_the_same([replayed], [y], lambda again=again: [again])
