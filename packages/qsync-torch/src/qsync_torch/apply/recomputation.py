"""Gradient checkpointing: what PyTorch runs again in a backward pass runs as it did in the forward pass.

``torch.utils.checkpoint`` calls a function of the user's again, in which there may be functional calls, or the model as a whole.
By then other forwards may have begun (a pipeline, two views of one batch), with other random numbers, and the model's mode may be
another.  :func:`wrap_checkpointing` lets it remember which entries were active, and the position of each in its random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch.utils.checkpoint as torch_checkpoint


class Replayable(Protocol):
    """An installation, as far as checkpointing is concerned."""

    def present(self) -> int | None:
        """The place of the present entry in its random numbers; ``PLAIN`` where it replaces nothing."""
        ...

    def again(self, position: int | None) -> Any:
        """A context in which a piece of an earlier entry runs again."""
        ...


PLAIN = -1
"""In place of a position: an entry in which nothing is replaced (eval mode)."""
ACTIVE: list[Replayable] = []
"""Installations with an entry that runs now, the outermost first."""

_Begun = list[tuple[Replayable, int | None]]
_RECORDERS: list[_Begun] = []
_REPLAYS: list[Iterator[tuple[Replayable, int | None]]] = []


def record(installation: Replayable) -> None:
    """Remember an entry that begins inside a checkpointed function."""
    if _RECORDERS:
        _RECORDERS[-1].append((installation, installation.present()))


def is_recording() -> bool:
    """Whether a checkpointed function runs for the first time."""
    return bool(_RECORDERS)


def next_replayed(installation: Replayable) -> int | None:
    """The position of an entry that began in a checkpointed function and runs again now; None where none does."""
    if not _REPLAYS:
        return None
    return next((position for begun, position in _REPLAYS[-1] if begun is installation), None)


class Checkpointed:
    """A function that runs in the forward pass and again in the backward pass."""

    def __init__(self, function: Callable[..., Any], has_run: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._has_run = function, has_run
        self._inside: _Begun = [(installation, installation.present()) for installation in ACTIVE]
        self._begun: _Begun = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the run in the forward pass."""
        _RECORDERS.append(self._begun)
        try:
            yield
        finally:
            _RECORDERS.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, for the first time or again."""
        if not self._has_run:
            self._has_run = True
            with self.recorded():
                return self._function(*args, **kwargs)
        with ExitStack() as stack:
            for installation, position in self._inside:
                stack.enter_context(installation.again(position))
            _REPLAYS.append(iter(self._begun))
            stack.callback(_REPLAYS.pop)
            return self._function(*args, **kwargs)


@functools.cache
def wrap_checkpointing() -> None:
    """Have ``torch.utils.checkpoint`` run every function through :class:`Checkpointed`; once in a process."""
    module: Any = torch_checkpoint
    reentrant = module.CheckpointFunction.forward
    without_reentrant = module._checkpoint_without_reentrant_generator

    @functools.wraps(reentrant)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, Checkpointed(run_function, has_run=False), *args)

    @functools.wraps(without_reentrant)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        checkpointed = Checkpointed(function, has_run=True)
        with checkpointed.recorded():
            yield from without_reentrant(checkpointed, *args, **kwargs)

    module.CheckpointFunction.forward = staticmethod(forward)
    module._checkpoint_without_reentrant_generator = generator
