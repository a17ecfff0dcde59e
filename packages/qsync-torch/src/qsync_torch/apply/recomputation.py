"""Gradient checkpointing: what runs again in a backward pass runs as it did in the forward pass.

A checkpoint calls a function of the user's again, in which there may be functional calls, or the model as a whole.  By then other
forwards may have begun (a pipeline, two views of one batch), with other random numbers, and the model's mode may be another.  So a
:class:`Passage` remembers which entries were active where the function ran first, and which began inside it, each with its position
in its random numbers.  :func:`wrap_checkpointing` makes one for every way that PyTorch has of running something again:

- ``torch.utils.checkpoint``;
- autograd functions of the user's, whose node is the same object in both passes: checkpointing of another make is one whose forward
  runs operators of a plan;
- ``saved_tensors_hooks``, whose ``unpack`` hook may compute what its ``pack`` hook did not keep.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks


class Replayable(Protocol):
    """An installation, as far as checkpointing is concerned."""

    def present(self) -> Any:
        """The place of the present entry in its random numbers; ``PLAIN`` where it replaces nothing."""
        ...

    def again(self, position: Any, *, by_gradient: bool = False) -> Any:
        """A context in which a piece of an earlier entry runs again; ``by_gradient``: among the products of a gradient formula."""
        ...


PLAIN = -1
"""In place of a position: an entry in which nothing is replaced (eval mode)."""
ACTIVE: list[Replayable] = []
"""Installations with an entry that runs now, the outermost first."""

_Begun = list[tuple[Replayable, object, Any]]
"""Entries: the installation, the module that was called, and the position."""

_RECORDERS: list[_Begun] = []
_HOOKED: list[_Begun] = []
_REPLAYS: list[tuple[_Begun, Iterator[tuple[Replayable, object, Any]] | None]] = []
"""What began in functions that run again now; an iterator over it where they run again in the same order."""


class Passage:
    """What is in force where a function begins to run, and the entries that begin inside it."""

    def __init__(self) -> None:
        self.inside = [(installation, installation.present()) for installation in ACTIVE]
        self.begun: _Begun = []

    @contextmanager
    def again(self, *, by_gradient: bool = False, in_order: bool = True) -> Iterator[None]:
        """Around the run in the backward pass.

        Args:
            by_gradient: among the products of a gradient formula.
            in_order: whether all runs again in the order of the forward pass.
        """
        with ExitStack() as stack:
            for installation, position in self.inside:
                stack.enter_context(installation.again(position, by_gradient=by_gradient))
            _REPLAYS.append((self.begun, iter(self.begun) if in_order else None))
            stack.callback(_REPLAYS.pop)
            yield


def record(installation: Replayable, module: object) -> None:
    """Remember an entry that begins inside functions which may run again."""
    if not (_RECORDERS or _HOOKED or OPEN) or torch.compiler.is_compiling():
        return
    entry = (installation, module, installation.present())
    for begun in (*_RECORDERS, *_HOOKED):
        begun.append(entry)
    for node, passage in _open_functions():
        passage.begun.append(entry)
        _replay(node, passage)


def is_recording() -> bool:
    """Whether a checkpointed function runs for the first time."""
    return bool(_RECORDERS) or (bool(OPEN) and bool(_open_functions()))


def next_replayed(installation: Replayable, module: object) -> Any:
    """The position of the entry of a checkpointed function that runs again now; None where there is none, or more than one."""
    if not _REPLAYS:
        return None
    begun, in_turn = _REPLAYS[-1]
    entries = begun if in_turn is None else in_turn
    found = (position for whose, called, position in entries if whose is installation and called is module)
    if in_turn is not None:
        return next(found, None)
    positions = list(found)  # a backward of one's own may run its parts in any order: of several, which one cannot be told
    return positions[0] if len(positions) == 1 else None


class Checkpointed:
    """A function that runs in the forward pass and again in the backward pass."""

    def __init__(self, function: Callable[..., Any], has_run: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._has_run = function, has_run
        self._passage = Passage()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the run in the forward pass."""
        _RECORDERS.append(self._passage.begun)
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
        with self._passage.again():
            return self._function(*args, **kwargs)


OPEN: list[tuple[weakref.ref[Any], Passage]] = []
"""Nodes of the user's autograd functions whose forward may still run."""


def _open_functions() -> list[tuple[Any, Passage]]:
    """Nodes whose forward runs; until it has, they have no outputs."""
    alive = [(reference, node, passage) for reference, passage in OPEN if (node := reference()) is not None]
    found = [(reference, node, passage) for reference, node, passage in alive if not node._input_metadata]
    OPEN[:] = [(reference, passage) for reference, _, passage in found]
    return [(node, passage) for _, node, passage in found]


def _forget(gone: weakref.ref[Any]) -> None:
    """A passage keeps its model: not for longer than the node is there."""
    OPEN[:] = [entry for entry in OPEN if entry[0] is not gone]


def operator_runs() -> None:
    """An operator of a plan runs: in the forward of autograd functions, it may run again in their backward."""
    for node, passage in _open_functions():
        _replay(node, passage)


def _replay(node: Any, passage: Passage) -> None:
    """Have the backward of an autograd function run with what was in force around its forward."""
    if "apply" not in node.__dict__:
        for name in ("apply", "apply_boxed"):
            if method := getattr(type(node), name, None):
                setattr(node, name, functools.partial(_backward, weakref.ref(node), passage, method))


def _backward(node: weakref.ref[Any], passage: Passage, method: Callable[..., Any], *grads: Any) -> Any:
    with passage.again(by_gradient=True, in_order=False):
        return method(node(), *grads)


def is_of_the_user(node: Any) -> bool:
    """Whether the autograd function of a node is neither PyTorch's nor one of ours."""
    return type(node)._forward_cls.__module__.partition(".")[0] not in ("torch", "qsync_torch")


def _function_begins(node: Any) -> None:
    """PyTorch makes the node of an autograd function before it runs the function's forward."""
    if not is_of_the_user(node):
        return
    _open_functions()
    passage = Passage()
    OPEN.append((weakref.ref(node, _forget), passage))
    if any(position == PLAIN for _, position in passage.inside):
        _replay(node, passage)


@functools.cache
def wrap_checkpointing() -> None:
    """Have all that PyTorch runs again remember its :class:`Passage`; once in a process."""
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
    _wrap_functions()
    _wrap_hooks()


def _wrap_functions() -> None:
    base: Any = BackwardCFunction
    made = base.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _function_begins(self)

    base.__init__ = init


def _wrap_hooks() -> None:
    hooks: Any = saved_tensors_hooks
    made, entered, left = hooks.__init__, hooks.__enter__, hooks.__exit__

    def init(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        made(self, pack_hook, unpack_hook)
        own = type(self) is hooks or not type(self).__module__.startswith("torch.")
        if own and not torch.compiler.is_compiling():
            self.qsync_passage = passage = Passage()

            @functools.wraps(unpack_hook, updated=())
            def unpack(packed: Any) -> Any:
                with passage.again(in_order=False):
                    return unpack_hook(packed)

            self.unpack_hook = unpack

    def enter(self: Any) -> Any:
        if (passage := getattr(self, "qsync_passage", None)) is not None:
            _HOOKED.append(passage.begun)
        return entered(self)

    def leave(self: Any, *args: Any) -> Any:
        if (passage := getattr(self, "qsync_passage", None)) is not None:
            _HOOKED[:] = [begun for begun in _HOOKED if begun is not passage.begun]
        return left(self, *args)

    hooks.__init__, hooks.__enter__, hooks.__exit__ = init, enter, leave
