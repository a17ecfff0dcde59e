"""Gradient checkpointing: what runs again in a backward pass runs as it did in the forward pass.

A checkpoint calls a function of the user's again, in which there may be functional calls, or the model as a whole.  By then other
forwards may have begun (a pipeline, two views of one batch), with other random numbers, and the model's mode may be another.  So a
:class:`Passage` remembers which entries were active where the function ran first, and which began inside it, each with its position
in its random numbers.  :func:`wrap_checkpointing` makes one for every way that PyTorch has of running something again:

- ``torch.utils.checkpoint``;
- autograd functions of the user's, whose node is the same object in both passes: checkpointing of another make is one whose forward
  runs operators of a plan, or which begins after such have run under ``no_grad``, whose results it may attach;
- ``saved_tensors_hooks``, whose ``unpack`` hook may compute what its ``pack`` hook did not keep.

What runs now is a thread's own (:data:`HERE`): other threads train and evaluate other models, and a backward pass may run in
another thread than its forward did, as it always does on a GPU.  What ran, and is to run again, belongs to the graph: a passage is
kept by the function, node or hooks that run it, and puts in force in the thread of the backward pass what was so in the forward's.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip as never_traced
from torch._dynamo.eval_frame import cached_backends
from torch._guards import detect_fake_mode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from qsync_core.errors import PlanError
from qsync_torch.operators.casts import CastCache


class EntryHere(threading.local):
    """What an installation does in this thread.

    Attributes:
        running: whether an entry runs now in which operators are replaced, and not what a script does around its entries.
        suspended: whether one runs in which nothing is replaced.
        may_repeat_unseen: whether an autograd function that begins now may run in its backward what has not run in its forward:
            nothing is replaced in this entry, or operators have run in it under ``no_grad``.
    """

    def __init__(self) -> None:
        self.running = self.suspended = self.may_repeat_unseen = False


class Replayable(Protocol):
    """An installation, as far as checkpointing is concerned."""

    here: EntryHere

    def present(self) -> Any:
        """The place of the present entry in its random numbers; ``PLAIN`` where it replaces nothing."""
        ...

    def from_here(self) -> _Again | None:
        """A way to have compiled entries run again as those that begin now; None where they have no random numbers."""
        ...

    def again(self, position: Any, *, by_gradient: bool = False, around: bool = False) -> Any:
        """A context in which a piece of an earlier entry runs again.

        Args:
            position: of the entry.
            by_gradient: among the products of a gradient formula.
            around: what runs may call the model, as the script does.
        """
        ...


PLAIN = -1
"""What stands for a position: an entry in which nothing is replaced (eval mode)."""
_Begun = list[tuple[weakref.ref[Any], weakref.ref[Any], Any]]
"""Entries: the installation, the module that was called, and the position."""
_Again = Callable[[], AbstractContextManager[None]]
INSTALLED: weakref.WeakSet[Replayable] = weakref.WeakSet()
"""All installations: of entries that a compiler has made nothing is heard when they begin."""


class Scope(dict[CastCache, CastCache]):
    """The casts that are shared within one run of a function, by the cache of their model.

    A checkpoint that is reentrant, or of another make, runs again with other tensors as inputs: what an operator before the
    function has made of one of them could not be found then.
    """

    def __missing__(self, cache: CastCache) -> CastCache:
        """None is shared yet."""
        self[cache] = cache.apart()
        return self[cache]


class _Replay(NamedTuple):
    """What may run again now: entries that began in a function, in turn or in any order, and those in which a tensor was saved."""

    begun: _Begun
    in_turn: Iterator[tuple[weakref.ref[Any], weakref.ref[Any], Any]] | None
    saved_in: Sequence[tuple[Replayable, Any]] = ()
    is_known: bool = True


class _Here(threading.local):
    """What runs in this thread.

    Attributes:
        active: installations with an entry that runs now, the outermost first.
        scopes: of functions that run, or run again; None: the casts of the whole forward.
        open: autograd functions of the user's, the innermost last, and after them some that have ended.
        recorders: entries of the checkpointed functions that run for the first time.
        hooked: hooks that are entered, with the entries that have begun since.
        replays: what runs again.
    """

    def __init__(self) -> None:
        self.active: list[Replayable] = []
        self.scopes: list[Scope | None] = []
        self.open: list[_OpenFunction] = []
        self.recorders: list[_Begun] = []
        self.hooked: list[tuple[object, _Begun]] = []
        self.replays: list[_Replay] = []


HERE = _Here()


class Passage:
    """What is in force where a function begins to run, and the entries that begin inside it.

    Args:
        inside: which entries are active there.
        scope: makes the scope of the casts in a run in the backward pass.
        counts: as :func:`_counts` says.
    """

    def __init__(self, inside: Sequence[Replayable], scope: Callable[[], Scope | None], counts: Sequence[_Again] = ()) -> None:
        self.inside = [(installation, installation.present()) for installation in inside]
        self.begun: _Begun = []
        self.unknown: list[tuple[Replayable, Any]] = []
        self.scope, self.counts = scope, counts

    @contextmanager
    def again(
        self,
        *,
        by_gradient: bool = False,
        in_order: bool = True,
        saved_in: Sequence[tuple[Replayable, Any]] = (),
        is_known: bool = True,
    ) -> Iterator[None]:
        """Surround the run in the backward pass.

        Args:
            by_gradient: among the products of a gradient formula.
            in_order: whether all runs again in the order of the forward pass.
            saved_in: entries that began inside, and their positions: what runs again belongs to these.
            is_known: whether it does; otherwise operators are refused.

        Raises:
            PlanError: when operators run again, and nothing tells of which entry.
        """
        with ExitStack() as stack:
            for count in self.counts:
                stack.enter_context(count())
            for installation, position in self.inside:
                stack.enter_context(installation.again(position, by_gradient=by_gradient))
            for installation, position in saved_in:
                stack.enter_context(installation.again(position, around=True))
            HERE.scopes.append(self.scope())
            stack.callback(HERE.scopes.pop)
            HERE.replays.append(_Replay(self.begun, iter(self.begun) if in_order else None, saved_in, is_known))
            stack.callback(HERE.replays.pop)
            yield


def record(installation: Replayable, module: object) -> None:
    """Remember an entry that begins inside functions which may run again."""
    if not (HERE.recorders or HERE.hooked or HERE.open):
        return
    entry = (weakref.ref(installation), weakref.ref(module), installation.present())
    for begun in HERE.recorders:
        begun.append(entry)
    for _, begun in HERE.hooked:
        # Hooks may stay for all of training: of more than one entry, which one runs again cannot be told anyway.
        if sum(earlier[:2] == entry[:2] for earlier in begun) < 2:
            begun.append(entry)
    for function in _open_functions():
        function.passage().begun.append(entry)


def runs_detached() -> bool:
    """Whether a function runs without gradients what it attaches to the graph itself: a reentrant checkpoint, or the user's."""
    return bool(HERE.scopes) or (bool(HERE.open) and bool(_open_functions()))


def is_recording() -> bool:
    """Whether a checkpointed function runs for the first time."""
    return bool(HERE.recorders) or (bool(HERE.open) and bool(_open_functions()))


def next_replayed(installation: Replayable, module: object) -> Any:
    """The position of the entry of a checkpointed function that runs again now; None where there is none, or more than one."""
    if not HERE.replays:
        return None
    replay = HERE.replays[-1]
    if replay.is_known:
        for whose, position in replay.saved_in:
            if whose is installation:
                return position
    entries = replay.begun if replay.in_turn is None else replay.in_turn
    found = (position for whose, called, position in entries if whose() is installation and called() is module)
    if replay.in_turn is not None:
        return next(found, None)
    positions = list(found)  # a backward of one's own may run its parts in any order: of several, which one cannot be told
    return positions[0] if len(positions) == 1 else None


class Checkpointed:
    """A function that runs in the forward pass and again in the backward pass.

    Args:
        function: what runs.
        reentrant: whether the first call is that of the forward pass, and both are given detached inputs.
    """

    def __init__(self, function: Callable[..., Any], reentrant: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._has_run, self.has_run_operators = function, not reentrant, False
        scope = _scope(_open_functions())
        inside = HERE.active or _of_modes()
        self._passage = Passage(inside, Scope if reentrant else lambda: scope, _counts(inside))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Surround the run in the forward pass."""
        recorders, begun = HERE.recorders, self._passage.begun
        recorders.append(begun)
        try:
            yield
        finally:  # of a function that failed: when its exception is freed, by whatever runs then
            recorders[:] = [other for other in recorders if other is not begun]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, for the first time or again."""
        if not self._has_run:
            self._has_run = True
            HERE.scopes.append(scope := Scope())
            try:
                with self.recorded():
                    return self._function(*args, **kwargs)
            finally:
                HERE.scopes.pop()
                self.has_run_operators = bool(scope)
        with self._passage.again():
            return self._function(*args, **kwargs)


class _OpenFunction:
    """An autograd function of the user's whose forward may still run.

    It is open from its making on.  It keeps neither its node, nor a model, nor the frame of the call, which is known by
    the instruction that it is at.
    """

    __slots__ = ("active", "call", "node", "scopes")

    def __init__(self, node: Any, caller: FrameType) -> None:
        self.node: weakref.ref[Any] = weakref.ref(node)
        self.call = id(caller), caller.f_lasti
        self.active, self.scopes = len(HERE.active), len(HERE.scopes)
        opened = HERE.open
        # Every function of a script comes here, under a plan or not: no more frames than this one.
        while opened:
            try:  # as may_run, in this frame
                if (last := opened[-1].node()) is not None and not last._input_metadata:
                    break
            except RuntimeError:
                pass
            opened.pop()
        if opened:
            _open_functions()
        for installation in HERE.active:
            if installation.here.may_repeat_unseen:
                self.passage().scope = Scope
                if installation.here.running:
                    refuse_compiled_backward(node)
                break
        if cached_backends and INSTALLED and not HERE.active and (counts := _counts(_of_modes())):
            node.qsync_counts = counts
            _have_run(node, functools.partial(_counted, self.node, counts))
        opened.append(self)

    @property
    def may_run(self) -> bool:
        """Whether its forward may still run: it has no outputs before its end, or if it failed and the exception is kept."""
        node = self.node()
        try:
            return node is not None and not node._input_metadata
        except RuntimeError:  # PyTorch 2.11 says so of a node that is gone
            return False

    def passage(self) -> Passage:
        """Have the function's backward run, from now on, with what was in force where it began."""
        node: Any = self.node()
        passage: Passage | None = node.__dict__.get("qsync_passage")
        if passage is None:
            passage = node.qsync_passage = Passage(HERE.active[: self.active], Scope, node.__dict__.get("qsync_counts", ()))
            _have_run(node, functools.partial(_backward, self.node, passage))
        return passage


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _open_in_compiled_code(node: Any, caller: FrameType) -> None:
    """Where a compiler has given up on a function, the mode of a compiled forward may be all that tells of it."""
    function = _OpenFunction(node, caller)
    if not HERE.active and (installations := _of_modes()):
        function.passage().unknown = [(installation, installation.present()) for installation in installations]


def _of_modes() -> list[Replayable]:
    """Installations with a compiled entry that runs now, which Python does not hear of; their modes are there in between."""
    modes = (torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack()))
    return [mode.installation for mode in modes if hasattr(mode, "installation")]


def _open_functions() -> list[_OpenFunction]:
    """List the functions whose forward runs."""
    found = [function for function in HERE.open if function.may_run]
    if found:
        calls = set(_calls())
        found = [function for function in found if function.call in calls]
    HERE.open[:] = found
    return found


def _calls() -> Iterator[tuple[int, int]]:
    """The frames that run now, each with the instruction that it is at."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield id(frame), frame.f_lasti
        frame = frame.f_back  # none is kept: one of them is this one


def _scope(functions: Sequence[_OpenFunction]) -> Scope | None:
    """Where casts are shared now, while these functions are open."""
    if not functions or len(HERE.scopes) > functions[-1].scopes:
        return HERE.scopes[-1] if HERE.scopes else None
    node: Any = functions[-1].node()
    scope: Scope | None = node.__dict__.get("qsync_scope")
    if scope is None:
        scope = node.qsync_scope = Scope()
    return scope


def operator_runs(cache: CastCache) -> CastCache:
    """An operator of a plan runs: in the forward of autograd functions, it may run again in their backward.

    Returns:
        Where its casts are shared.

    Raises:
        PlanError: when it runs again, and nothing tells with which random numbers.
    """
    if HERE.replays and not (HERE.replays[-1].is_known or HERE.active[-1].here.running):
        raise PlanError(
            "a weight of the plan is multiplied with inside a backward pass, by an autograd function of a compiled model or under "
            "hooks that several forwards ran under, and nothing tells which forward this repeats, whose random numbers it has to "
            "take: checkpoint with torch.utils.checkpoint.checkpoint(..., use_reentrant=False), and modules where the model is "
            "compiled"
        )
    functions = _open_functions()
    for function in functions:
        function.passage().scope = Scope
        refuse_compiled_backward(function.node())
    if not functions and not torch.is_grad_enabled():
        for installation in HERE.active:
            installation.here.may_repeat_unseen = True
    scope = _scope(functions)
    return cache if scope is None else scope[cache]


def communicates() -> None:
    """Ranks communicate: autograd functions that do so in their forward do in their backward, which is intercepted too then."""
    for function in _open_functions():
        function.passage()
        refuse_compiled_backward(function.node())


def runs_again(node: Any) -> bool:
    """Whether the node of an autograd function is one whose backward runs with what was in force around its forward."""
    passage: Passage | None = node.__dict__.get("qsync_passage")
    return passage is not None and not passage.unknown


def refuse_compiled_backward(node: Any) -> None:
    """Compiled autograd traces the backward of a function past :func:`_backward`; it asks each node for this key first."""
    node._compiled_autograd_key = _refuse_compiled_autograd


def _refuse_compiled_autograd() -> Any:
    raise PlanError(
        "compiled autograd compiles a backward pass in which an autograd function runs operators of the plan again: with which "
        "random numbers is lost there; checkpoint with torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave "
        "compiled autograd out"
    )


def _counts(inside: Sequence[Replayable]) -> list[_Again]:
    """What has compiled entries run again as those that begin now, of models that a script may call here."""
    others = [installation for installation in INSTALLED if all(installation is not one for one in inside)]
    if others and detect_fake_mode() is not None:  # a compiler reads this, and runs nothing
        return []
    return [again for installation in others if (again := installation.from_here()) is not None]


def _have_run(node: Any, instead: Callable[..., Any]) -> None:
    """Have the backward of an autograd function run by another, which is given PyTorch's method and the gradients."""
    for name in ("apply", "apply_boxed"):
        if method := getattr(type(node), name, None):
            setattr(node, name, functools.partial(instead, method))


def _counted(node: weakref.ref[Any], counts: Sequence[_Again], method: Callable[..., Any], *grads: Any) -> Any:
    with ExitStack() as stack:
        for count in counts:
            stack.enter_context(count())
        return method(node(), *grads)


def _backward(node: weakref.ref[Any], passage: Passage, method: Callable[..., Any], *grads: Any) -> Any:
    with passage.again(by_gradient=True, in_order=False, saved_in=passage.unknown, is_known=not passage.unknown):
        return method(node(), *grads)


def is_of_the_user(node: Any) -> bool:
    """Whether the autograd function of a node is neither PyTorch's nor one of ours."""
    return type(node)._forward_cls.__module__.partition(".")[0] not in _LIBRARIES


_LIBRARIES = ("torch", "qsync_torch")
_COMMUNICATING = "torch.distributed.nn.functional"
"""PyTorch's autograd functions whose backward communicates as their forward does."""


@functools.cache
def wrap_checkpointing() -> None:
    """Have all that PyTorch runs again remember its :class:`Passage`; once in a process."""
    module: Any = torch_checkpoint
    reentrant = module.CheckpointFunction.forward
    without_reentrant = module._checkpoint_without_reentrant_generator

    @functools.wraps(reentrant)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        output = reentrant(ctx, checkpointed := Checkpointed(run_function, reentrant=True), *args)
        if checkpointed.has_run_operators:
            refuse_compiled_backward(ctx)
        return output

    @functools.wraps(without_reentrant)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        checkpointed = Checkpointed(function, reentrant=False)
        with checkpointed.recorded():
            yield from without_reentrant(checkpointed, *args, **kwargs)

    module.CheckpointFunction.forward = staticmethod(forward)
    module._checkpoint_without_reentrant_generator = generator
    _wrap_functions()
    _wrap_hooks()


def _wrap_functions() -> None:
    """Note where autograd functions of the user's begin; PyTorch makes a node before it runs its function's forward."""
    base: Any = BackwardCFunction
    made = base.__init__

    @never_traced
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        module = type(self)._forward_cls.__module__
        if module.partition(".")[0] in _LIBRARIES and module != _COMMUNICATING:
            return
        begin = _OpenFunction if get_eval_frame_callback() is None else _open_in_compiled_code
        begin(self, sys._getframe(1))

    base.__init__ = init


def _wrap_hooks() -> None:
    hooks: Any = saved_tensors_hooks
    entered, left = hooks.__enter__, hooks.__exit__

    def enter(self: Any) -> Any:
        own = type(self) is hooks or not type(self).__module__.startswith("torch.")
        if not own or torch.compiler.is_compiling():
            return entered(self)
        scope, given = _scope(_open_functions()), (self.pack_hook, self.unpack_hook)
        passage = Passage(HERE.active, lambda: scope)
        HERE.hooked.append((self, passage.begun))
        self.pack_hook, self.unpack_hook = _repeatable(*given, passage)
        try:
            return entered(self)
        finally:
            self.pack_hook, self.unpack_hook = given

    def leave(self: Any, *args: Any) -> Any:
        if (last := next((entry for entry in reversed(HERE.hooked) if entry[0] is self), None)) is not None:
            HERE.hooked[:] = [entry for entry in HERE.hooked if entry is not last]
        return left(self, *args)

    hooks.__enter__, hooks.__exit__ = enter, leave


def _repeatable(
    pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any], passage: Passage
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Hooks that know in which entry a tensor was saved, and in which format a plan had it.

    What ``unpack`` computes is a piece of that entry.  Hooks that keep 16 bits of everything give float32 back, as a model without
    a plan has it.
    """
    outside = len(passage.inside)

    @functools.wraps(pack_hook, updated=())
    def pack(tensor: Any) -> Any:
        dtype = tensor.dtype if HERE.active and tensor.is_floating_point() else None
        return pack_hook(tensor), dtype, [(installation, installation.present()) for installation in HERE.active[outside:]]

    @functools.wraps(unpack_hook, updated=())
    def unpack(packed: Any) -> Any:
        value, dtype, saved_in = packed
        is_known = True
        for whose, _, position in () if saved_in else passage.begun:
            if (installation := whose()) is not None:
                is_known = is_known and all(installation is not other for other, _ in saved_in)
                saved_in = [*saved_in, (installation, position)]
        with passage.again(in_order=False, saved_in=saved_in, is_known=is_known):
            unpacked = _never_compiled(unpack_hook)(value)
        return unpacked.to(dtype) if dtype is not None and unpacked.is_floating_point() else unpacked

    unpack._torchdynamo_disable = True  # type: ignore[attr-defined]
    return pack, unpack


def _never_compiled(unpack_hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiled autograd would compile what an ``unpack`` hook calls; what is compiled takes the random numbers of a new forward."""
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False):
        disabled: Callable[[Any], Any] = torch.compiler.disable(unpack_hook)
        return disabled
    return unpack_hook
