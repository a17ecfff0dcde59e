"""Record what a function of tensors does: allocations, PyTorch's operators and launches of kernels, as a program.

The program does the same for all tensors of the same shapes, strides, formats, devices and alignment, in C++.  What depends on the
numbers in a tensor is not recorded: the recorder refuses it, and Python goes on to run it.  A program is kept only if it gives the
bits that Python gives, whenever Python gives the same twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsync_core.kernels.launches import HERE, Stream
from qsync_torch.torch_internals import TorchDispatchMode

_ATEN = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_strided.default,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)


Tensors = Sequence[torch.Tensor | None]

_KEPT: dict[int, torch.Tensor] = {}
"""Tensors of kernels' own, by their address: programs hold the address alone, so that they stay alive here."""


class RefusedError(Exception):
    """Something cannot be recorded."""


def recorded(new_program: Callable[[], Any], function: Callable[..., Tensors], tensors: Tensors) -> Any:
    """The program of a function, which runs once; None where it cannot be recorded.

    Args:
        new_program: makes an empty one.
        function: of the tensors, without derivatives and without autocast.
    """
    device = next(x.device.type for x in tensors if x is not None)
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad(), torch.autocast(device, enabled=False):
        try:
            program, results = _seen(_Recorder(new_program(), tensors), function, tensors)
            return program if _does_the_same(program.run(tuple(tensors)), results, lambda: function(*tensors)) else None
        except (RefusedError, torch.OutOfMemoryError):  # it takes the memory of two calls, of which the job may have one
            return None


def _seen(recorder: _Recorder, function: Callable[..., Tensors], tensors: Tensors) -> tuple[Any, Tensors]:
    """Run a function; give its program and its results, without what else it made.

    Raises:
        RefusedError: where it cannot be recorded.
    """
    HERE.recorder = recorder
    try:
        with recorder:
            results = function(*tensors)
        recorder.end(results)
    finally:
        HERE.recorder = None
    if recorder.refusal:
        raise RefusedError
    return recorder.program, results


def _does_the_same(replayed: Tensors, results: Tensors, again: Callable[[], Tensors]) -> bool:
    """Whether both are the same bits, or as near to each other as Python's own calls are, of a kernel that sums in any order."""
    if _are_equal(replayed, results):
        return True
    if not _are_equal(again(), results) and _are_near(replayed, results):
        return True
    warnings.warn("a recorded call gave other bits than Python's, which goes on to run it: please report this", stacklevel=2)
    return False


def _pairs(ones: Tensors, others: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, y) for x, y in zip(ones, others, strict=True) if x is not None and y is not None and y.numel()]


def _are_equal(ones: Tensors, others: Tensors) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(-1).view(torch.uint8)

    return all(x.dtype is y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in _pairs(ones, others))


def _are_near(ones: Tensors, others: Tensors) -> bool:
    pairs = ((_finite(x), _finite(y)) for x, y in _pairs(ones, others))
    return all(bool((x - y).norm() <= 0.01 * y.norm()) for x, y in pairs)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Cast to float32, with 0 where a number overflows, as in the first steps under a gradient scaler."""
    return x.float().nan_to_num(0.0, 0.0, 0.0)


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _extent(x: torch.Tensor) -> int:
    """The bytes from its first element to the end of its last one."""
    if not x.numel():
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


class _Recorder(TorchDispatchMode):
    """A mode that sees PyTorch's operators, and is told of launches.

    A tensor is known by the memory that it has; all that is seen stays alive, so that no address means two.
    """

    def __init__(self, program: Any, tensors: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program, self.refusal, self._is_aside = program, "", False
        self._known: list[tuple[int, int, int, torch.Tensor]] = []
        self._views: dict[tuple[Any, ...], int] = {}
        self._alive: list[torch.Tensor] = []
        self._slots = len(tensors)
        for slot, x in enumerate(tensors):
            if x is not None and x.numel():
                begin, end = x.data_ptr(), x.data_ptr() + _extent(x)
                if any(begin < other_end and other < end for other, other_end, _, _ in self._known):
                    self.refuse("operands share memory")
                self._known.append((begin, end, slot, x))

    def refuse(self, reason: str) -> None:
        self.refusal = reason

    def keeps(self, tensor: torch.Tensor) -> None:
        _KEPT[tensor.data_ptr()] = tensor

    def end(self, results: Tensors) -> None:
        """Say what the function returned.

        Raises:
            RefusedError: where a result is nothing that it made.
        """
        self.program.outputs = [-1 if x is None else self._slot(x) for x in results]
        self.program.slots = self._slots

    def launched(self, function: Any, before: tuple[Any, ...], addresses: Sequence[int], after: tuple[Any, ...]) -> None:
        given: list[Any] = [*before, *addresses, *after]
        stream = next((place for place, value in enumerate(given) if isinstance(value, Stream)), -1)
        read = given[stream].read if stream >= 0 else None
        places = [
            (place, *found) for place, value in enumerate(addresses, len(before)) if (found := self._place(value)) is not None
        ]
        for place, *_ in places:
            given[place] = None
        if stream >= 0:
            given[stream] = None
        self.program.call(function, given, places, [], stream, read)

    def called(self, function: Any, tensors: Sequence[Any], after: tuple[Any, ...]) -> Any:
        self._is_aside, HERE.recorder = True, None
        try:
            result = function(*tensors, *after)
        finally:
            self._is_aside, HERE.recorder = False, self
        given = [*(_KEPT.get(x.data_ptr()) for x in tensors), *after]
        slots = [(place, self._slot(x)) for place, x in enumerate(tensors) if given[place] is None]
        self.program.call(function, given, [], slots, -1, None)
        return result

    def called_in_c(
        self, function: int, arguments: bytes, pointers: Sequence[int], stream: int, fails: Callable[[int], None]
    ) -> None:
        words = ((pointer, int.from_bytes(arguments[pointer : pointer + 8], "little")) for pointer in pointers)
        places = [(pointer, *found) for pointer, address in words if (found := self._place(address)) is not None]
        self.program.c_call(function, arguments, places, stream, _current_stream, fails)

    def _place(self, address: int) -> tuple[int, int] | None:
        """Slot and offset of an address; None of no memory, and of what is the kernel's own.

        Raises:
            RefusedError: where it is in no memory that is known.
        """
        if not address or address in _KEPT:
            return None
        for begin, end, slot, _ in self._known:
            if begin <= address < end:
                return slot, address - begin
        raise RefusedError

    def _slot(self, x: torch.Tensor) -> int:
        """The slot of a tensor, which a view gets when it is first asked for."""
        if not x.numel():
            slot = self._new(x)
            self.program.allocate(slot, list(x.shape), list(x.stride()), x)
            return slot
        place = self._place(x.data_ptr())
        assert place is not None
        base = next(known for _, _, slot, known in self._known if slot == place[0])
        if x.dtype is not base.dtype:
            raise RefusedError
        offset = place[1] // x.element_size()
        if (x.shape, x.stride(), offset) == (base.shape, base.stride(), 0):
            return place[0]
        key = (place, x.shape, x.stride())
        if key not in self._views:
            self._views[key] = self._slots
            self.program.view(self._slots, place[0], list(x.shape), list(x.stride()), offset)
            self._slots += 1
        return self._views[key]

    def _new(self, x: torch.Tensor) -> int:
        slot, self._slots = self._slots, self._slots + 1
        self._alive.append(x)
        if x.numel():
            self._known.append((x.data_ptr(), x.data_ptr() + max(_extent(x), 1), slot, x))
        return slot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.refusal or self._is_aside:
            return result
        if func in _ALLOCATIONS:
            if result.is_pinned() or result.layout is not torch.strided:
                raise RefusedError
            self.program.allocate(self._new(result), list(result.shape), list(result.stride()), result)
            return result
        given = {str(place): value for place, value in enumerate(args)} | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        results = result if isinstance(result, tuple) else (result,)
        if not all(x is None or isinstance(x, torch.Tensor) for x in results):
            raise RefusedError  # a number that Python goes on with, or a list
        if len(results) == 1 and self._is_view(result, tensors):
            self._alive.append(result)
            return result
        slots = [(name, self._slot(x)) for name, x in tensors.items()]
        own = [-1 if x is None or any(x is y for y in tensors.values()) else self._new(x) for x in results]
        constants = {name: value for name, value in given.items() if name not in tensors}
        try:
            self.program.op(*func.name().partition(".")[::2], constants, slots, own)
        except (ValueError, RuntimeError) as error:
            raise RefusedError from error
        return result

    def _is_view(self, result: torch.Tensor, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether it is another look at the memory of an operand, and no operand itself, which an operator has written to."""
        storage = result.untyped_storage().data_ptr()
        if any(result is x for x in tensors.values()):
            return False
        return not result.numel() or any(x.untyped_storage().data_ptr() == storage for x in tensors.values())
