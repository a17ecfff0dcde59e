"""What every call of a kernel does: its operands are checked once, and a compiled kernel is launched again without analysing them.

Triton's own analysis of arguments takes longer than a small kernel runs.  The first launch for a key goes through
``function[grid](...)``, which compiles and returns a compiled kernel; later ones call that kernel directly with addresses instead
of tensors.  The caller's key has to hold everything that Triton would specialise on: types, values of specialised integers, the
device; whether addresses are multiples of 16 is added here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from qsync_core.errors import BackendError
from qsync_core.kernels.launches import HERE, Stream

_KNOWN_LAUNCHERS = {(3, minor) for minor in (6, 7, 8, 9)}
_IS_KNOWN = tuple(map(int, triton.__version__.split(".")[:2])) in _KNOWN_LAUNCHERS
"""Whether a compiled kernel's ``run`` takes what Triton's own launch gives it in these versions; else its public call is used."""


Grid = tuple[int, int, int]


class Launch:
    """A kernel with its compile-time constants and launch options.

    Args:
        function: the ``triton.jit`` function: tensors first, then numbers, then constants.
        constants: values of its ``tl.constexpr`` parameters.
        options: ``num_warps`` and other options of Triton's launch.
    """

    def __init__(self, function: Any, constants: dict[str, Any], **options: Any) -> None:
        # Contraction to fused multiply-adds would make bits depend on the compiler.
        self._function, self._constants, self._options = function, constants, {"enable_fp_fusion": False} | options
        self._trailing = tuple(constants[name] for name in function.arg_names if name in constants)
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: Grid, key: Any, tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...]) -> None:
        """Run on the current stream of the current device."""
        addresses = [x.data_ptr() for x in tensors]
        key = (key, *[address % 16 == 0 for address in addresses])
        compiled, recorder = self._compiled.get(key), HERE.recorder
        if compiled is not None:
            if _IS_KNOWN and not _has_hooks():
                active = driver.active
                stream = active.get_current_stream(active.get_current_device())
                before, after = (compiled.function, compiled.packed_metadata, None, None, None), (*numbers, *self._trailing)
                compiled.run(*grid, stream, *before, *addresses, *after)
                if recorder is not None and not all(isinstance(number, (int, float)) for number in numbers):
                    recorder.refuse("an argument is no number")
                elif recorder is not None:
                    recorder.launched(compiled.run, (*grid, _STREAM, *before), addresses, after)
            else:
                compiled[grid](*addresses, *numbers, *self._trailing)
                if recorder is not None:
                    recorder.refuse("Triton reports launches to a profiler")
            return
        if _HERE.rehearses:
            self._function.warmup(*tensors, *numbers, grid=grid, **self._constants, **self._options)
            if recorder is not None:
                recorder.refuse("it is compiled, and not launched")
            return
        launch = functools.partial(self._function[grid], **self._constants, **self._options)
        compiled = launch(*tensors, *numbers) if recorder is None else recorder.called(launch, tensors, numbers)
        if hasattr(compiled, "run"):  # Triton's interpreter returns nothing.
            self._compiled[key] = compiled
            if recorder is not None:
                recorder.refuse("it was compiled, and another call launches it without Triton's analysis of arguments")


_STREAM = Stream(lambda device: int(driver.active.get_current_stream(device)))


def _has_hooks() -> bool:
    """Whether a profiler has registered for launches; only Triton's own call reports to it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Here(threading.local):
    rehearses = False


_HERE = _Here()
_COMPILERS = 8
"""A fifth of a kernel's compilation is Python, of which one thread runs at a time: more would not be faster."""


@contextmanager
def rehearsal() -> Iterator[None]:
    """Compile side by side what this thread would launch inside, in Triton's mode for that; what fails is left to its launch."""
    with ThreadPoolExecutor(_COMPILERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        _HERE.rehearses = True
        try:
            yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            _HERE.rehearses = False


class Planned:
    """A kernel that checks its operands, and decides how to treat them, once for all operands of the same types and layouts.

    Args:
        plan: takes the operands and returns what a call with operands like these does; raises where they do not fit.
    """

    def __init__(self, plan: Callable[..., Callable[..., None]]) -> None:
        self._plan = plan
        self._plans: dict[Any, Callable[..., None]] = {}

    def __call__(self, first: torch.Tensor, *others: torch.Tensor | float | None) -> None:
        """Run on the device of the first operand."""
        key = tuple(
            [(x.dtype, x.shape, x.stride(), x.device) if isinstance(x, torch.Tensor) else type(x) for x in (first, *others)]
        )
        run = self._plans.get(key)
        if run is None:
            run = self._plans[key] = self._plan(first, *others)
        if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                run(first, *others)
        else:
            run(first, *others)


def refuse(op: str, problems: Iterable[str]) -> None:
    """Raise one error with all problems, if there are any.

    Raises:
        BackendError: naming the operator.
    """
    if said := "; ".join(problems):
        raise BackendError(f"backend triton cannot run {op}: {said}")


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """An 8-bit tensor as int8: itself, or a view."""
    return x if x.dtype is torch.int8 else x.view(torch.int8)


def signed_words(value: int) -> tuple[int, int]:
    """The low and the high 32 bits as signed integers, so that a kernel sees one type whatever the value."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, ((value >> 32 & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
