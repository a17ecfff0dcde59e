"""Replacing the calls that a model makes: one installation, which ``apply_`` and observing share.

It finds each operator where the model calls it (a Linear or Conv2d module, or ``F.linear``, ``F.conv2d`` and ``@`` with a weight of
the model) and puts an :class:`OperatorCall` there.  Modules keep their identity; what changes is the ``forward`` that an instance
has, and :meth:`Installation.remove` takes that away again.  A copy of such a module runs as the module was before.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_torch.apply.calls_outside import NodesInside, Stretch, compiler_reads
from qsync_torch.apply.first_step import too_deep
from qsync_torch.apply.functional_calls import OperatorCall, WeightCalls, WeightPlace, may_call_functions
from qsync_torch.apply.interception import Interception, is_indifferent
from qsync_torch.apply.plan_fit import Addressed
from qsync_torch.apply.recomputation import HERE, INSTALLED, PLAIN, EntryHere, next_replayed, record, wrap_checkpointing
from qsync_torch.operators.casts import CastCache
from qsync_torch.operators.norms import in_float32, layer_norm

Forward = Callable[..., Any]
_ABSENT: Any = object()


class Installation(abc.ABC):
    """Replaced forwards of a model and its modules.

    A forward of the model, or of a part of it that is called by itself, is an *entry*: what it calls of the model runs inside it.

    Attributes:
        model: the model.
        cache: casts that consumers share within a forward.
        here: what it does in this thread.
        running: whether a compiled entry runs, in whatever thread: a compiler loses what is written to a thread's own.
        nodes: what its entries have made of autograd's graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cache = CastCache()
        self.here = EntryHere()
        self.running = False
        self.nodes = NodesInside()
        self._one_thread = threading.RLock()
        self._calls = WeightCalls(())
        self._around: AbstractContextManager[Any] = contextlib.nullcontext()
        self._replaced: list[tuple[nn.Module, Any, Any]] = []
        self._of_classes: list[tuple[nn.Module, Forward, Any]] = []

    @abc.abstractmethod
    def start_forward(self, whole: bool) -> None:
        """An entry begins; ``whole`` where it is the model's forward and not that of a part."""

    @abc.abstractmethod
    def end_forward(self) -> None:
        """The entry has ended, or failed."""

    def is_on(self, module: nn.Module) -> bool:
        """Whether operators are replaced in the entry that begins now, of the model or of a part of it."""
        return True

    def begins_plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: B027
        """An entry begins in which nothing is replaced."""

    def finish(self, output: Any, whole: bool) -> Any:
        """What an entry returns, from what the replaced operators made."""
        return output

    def position(self) -> Any:
        """The place of this entry in the sequence of random numbers; None where there are none."""
        return None

    def present(self) -> Any:
        """:meth:`position`, or that operators are not replaced in this entry."""
        return PLAIN if self.here.suspended else self.position()

    def from_here(self) -> Callable[[], AbstractContextManager[None]] | None:
        """A way to have compiled entries run again as those that begin now; None where they have no random numbers."""
        return None

    def at_position(self, position: Any) -> AbstractContextManager[None]:
        """Have the random numbers of that place for a while."""
        raise NotImplementedError

    def install(
        self,
        addressed: Addressed,
        calls: Mapping[OpId, OperatorCall],
        *,
        promote: bool,
        refused: Sequence[WeightPlace] = (),
        remedy: str = "",
    ) -> None:
        """Put the calls in their places.

        Args:
            addressed: where the operators are.
            calls: by operator; operators of one weight have one, under their first call.
            promote: whether formats can mix, so that functions that refuse mixed ones need their operands promoted.
            refused: places of weights that must not be used in a linear or convolution.
            remedy: what to do where one is.
        """
        wrap_checkpointing()
        _watch_scripting()
        INSTALLED.add(self)
        self._calls = WeightCalls([(place, calls[op_id]) for op_id, place in addressed.weights], refused, self.model, remedy)
        self._around = interception = Interception(self.cache, self._calls, promote=promote, installation=self)
        for op_id, module in addressed.modules:
            self.replace_forward(module, functools.partial(self._operator, calls[op_id]))
        indifferent = {id(module): module for module in self.model.modules() if is_indifferent(module)}
        for module in indifferent.values():
            self.replace_forward(module, functools.partial(self._aside, interception))
        elsewhere = {id(self.model), *(id(module) for _, module in addressed.modules), *indifferent}
        for module in self.model.modules():
            if promote and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.replace_forward(module, self._recurrent)
            if id(module) not in elsewhere and may_call_functions(module):
                self.replace_forward(module, functools.partial(self._entry, False))
        self.replace_forward(self.model, functools.partial(self._entry, True))

    def replace_forward(self, module: nn.Module, make: Callable[[nn.Module, Forward], Forward]) -> None:
        """Give an instance a forward; ``make`` gets the module, and its present forward as a function of (module, ...)."""
        earlier = module.__dict__.get("forward", _ABSENT)
        if earlier is _ABSENT:
            inner: Forward = type(module).forward
            if type(module).forward is inner:  # no descriptor that makes another one each time
                self._of_classes.append((module, inner, getattr(type(module), "_conv_forward", None)))
        elif isinstance(earlier, types.MethodType):
            inner = earlier.__func__
        else:
            inner = lambda _, *args, **kwargs: earlier(*args, **kwargs)  # noqa: E731
        function = functools.wraps(inner)(make(module, inner))
        function.qsync_replaced = (weakref.ref(module), None if earlier is _ABSENT else inner)  # type: ignore[attr-defined]
        forward = types.MethodType(function, module)
        self._replaced.append((module, earlier, forward))
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Take every change back.

        Raises:
            PlanError: when a forward was replaced again since; take that replacement back first.
        """
        for module, _, forward in {id(entry[0]): entry for entry in self._replaced}.values():
            if module.__dict__.get("forward") is not forward:
                raise PlanError(
                    f"the forward of {type(module).__name__} was replaced after the plan was applied; take that replacement back "
                    "before remove()"
                )
        for module, earlier, _ in reversed(self._replaced):
            if earlier is _ABSENT:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = earlier
        self._replaced.clear()
        self._of_classes.clear()
        self.cache.clear()
        INSTALLED.discard(self)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def check_classes(self) -> bool:
        """The forwards that a model's classes had when they were replaced are those that run; a compiler asks this while it reads.

        Raises:
            PlanError: when a class has another one now, a module another class, or PyTorch other functions.
        """
        for name in ("linear", "conv2d"):
            if not isinstance(function := getattr(F, name), types.BuiltinFunctionType):
                raise PlanError(
                    f"torch.nn.functional.{name} is {getattr(function, '__qualname__', function)} of the script, which operators "
                    "of a plan do not call: put PyTorch's own back, and write what it does into the model, before trace and apply_"
                )
        for module, inner, convolves in self._of_classes:
            if type(module).forward is not inner or getattr(type(module), "_conv_forward", None) is not convolves:
                name = next((repr(name) for name, part in self.model.named_modules() if part is module and name), "the model")
                raise PlanError(
                    f"the class of {name}, {type(module).__name__}, has another forward than when the plan was applied, which "
                    "would not run: change classes and their forwards before trace and apply_, or call remove() and apply_ again"
                )
        return True

    def check_repeated(self, module: nn.Module) -> None:  # noqa: B027
        """A part runs in a backward pass, and no forward is known that it repeats."""

    @contextlib.contextmanager
    def again(self, position: Any, *, by_gradient: bool = False, around: bool = False) -> Iterator[None]:
        """Run a piece of an earlier entry again, as gradient checkpointing does in a backward pass.

        Args:
            position: of the entry.
            by_gradient: around the whole backward of an autograd function, whose formula may multiply with weights as well.
            around: around what may call the model, or parts of it, as a script does.
        """
        if position is None:
            yield
            return
        if position == PLAIN:
            with self._suspension():
                yield
            return
        here = self.here
        was_running, here.running = here.running, here.running or not around
        self.nodes.begin(Stretch.PLANNED)
        HERE.active.append(self)  # what is checkpointed inside runs once more
        try:
            with self.at_position(position), self._calls.repeating(by_gradient), self._around:
                yield
        finally:
            HERE.active.remove(self)
            self.nodes.end()
            here.running = was_running
            if not was_running:
                self.cache.end_forward()

    @contextlib.contextmanager
    def _suspension(self) -> Iterator[None]:
        """An entry in which nothing is replaced."""
        here = self.here
        before = here.running, here.suspended, here.may_repeat_unseen
        here.running, here.suspended, here.may_repeat_unseen = False, True, True
        self.nodes.begin(Stretch.PLAIN)
        HERE.active.append(self)
        try:
            yield
        finally:
            HERE.active.remove(self)
            self.nodes.end()
            here.running, here.suspended, here.may_repeat_unseen = before

    def _operator(self, call: OperatorCall, owner: Any, inner: Forward) -> Forward:
        """An operator that is a module's forward; inside a forward of the model, no frame stands before its call."""

        here = self.here

        def otherwise(module: nn.Module, input: torch.Tensor, run: Forward) -> Any:
            if here.suspended or module is not owner:
                return inner(module, input)
            return self._enter(module is self.model, run, inner, module, (input,), {})

        def linear(module: Any, input: torch.Tensor) -> torch.Tensor:
            return call.linear(input, module.weight, module.bias)

        def conv2d(module: Any, input: torch.Tensor) -> torch.Tensor:
            return call.conv2d(input, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)

        def forward_linear(module: Any, input: torch.Tensor) -> Any:
            if (self.running or here.running) and module is owner:
                return call.linear(input, module.weight, module.bias)
            return otherwise(module, input, linear)

        def forward_conv2d(module: Any, input: torch.Tensor) -> Any:
            if module.padding_mode != "zeros" or "_conv_forward" in module.__dict__:
                changed = "padding_mode" if module.padding_mode != "zeros" else "_conv_forward"
                raise PlanError(
                    f"{module} has another {changed} than when the plan was applied, and the plan's kernels pad with zeros: "
                    "change it before the plan is made and applied"
                )
            if (self.running or here.running) and module is owner:
                return call.conv2d(input, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)
            return otherwise(module, input, conv2d)

        return forward_linear if isinstance(owner, nn.Linear) else forward_conv2d

    def _entry(self, whole: bool, owner: nn.Module, inner: Forward) -> Forward:
        """The model, or a part of it that gradient checkpointing or a user may run by itself."""

        here = self.here

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.running or here.running or here.suspended or module is not owner:
                return inner(module, *args, **kwargs)
            return self._enter(whole, inner, inner, module, args, kwargs)

        # Dynamo keeps what it compiles beside a function's code, eight versions of it: each model has a code of its own.
        forward.__code__ = forward.__code__.replace()
        return forward

    def _enter(
        self, whole: bool, replaced: Forward, plain: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an entry, from its beginning to what it returns."""
        if torch.compiler.is_compiling():
            return self._run(whole, replaced, module, args, kwargs) if self.is_on(module) else plain(module, *args, **kwargs)
        _check_called(module)
        if (position := next_replayed(self, module)) is not None:
            with self.again(position):
                record(self, module)  # what is checkpointed inside a checkpoint runs once more
                if position == PLAIN:
                    return plain(module, *args, **kwargs)
                return self.finish(replaced(module, *args, **kwargs), whole)
        if not self.is_on(module):
            self.begins_plain(module, args, kwargs)
            with self._suspension():
                record(self, module)
                return plain(module, *args, **kwargs)
        if torch._C._current_graph_task_id() != -1 and (position := self.position()) is not None:
            self.check_repeated(module)
            with self.again(position):
                return self.finish(replaced(module, *args, **kwargs), whole)
        if not self._one_thread.acquire(blocking=False):
            raise PlanError(
                "an applied model runs in two threads at once (nn.DataParallel does that); use DistributedDataParallel, "
                "with a process for each device, or a copy of the model (copy.deepcopy) in each thread"
            )
        self.here.may_repeat_unseen = False
        self.nodes.begin(Stretch.PLANNED)
        HERE.active.append(self)
        try:
            return self._run(whole, replaced, module, args, kwargs)
        finally:
            HERE.active.pop()
            self.nodes.end()
            self._one_thread.release()

    def _run(self, whole: bool, replaced: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls.start_forward()
        self.start_forward(whole)
        if not torch.compiler.is_compiling():
            record(self, module)
        elif whole:
            compiler_reads(self.nodes.name)
        entry = self if torch.compiler.is_compiling() else self.here
        entry.running = True
        try:
            with self._around:
                output = replaced(module, *args, **kwargs)
        finally:
            entry.running = False
            self.cache.end_forward()
            self._calls.end_forward()
            self.end_forward()
        if isinstance(output, types.GeneratorType):
            return self._in_pieces(output, whole, self.position())
        if not (isinstance(output, torch.Tensor) or torch.compiler.is_compiling()):
            try:
                parts, structure = pytree.tree_flatten(output)
            except RecursionError:
                raise too_deep(output) from None
            if places := [place for place, part in enumerate(parts) if isinstance(part, types.GeneratorType)]:
                for place in places:  # the entry is whole when the last one has ended
                    parts[place] = self._in_pieces(parts[place], whole and place == places[-1], self.position())
                output, whole = pytree.tree_unflatten(parts, structure), False
        return self.finish(output, whole)

    def _in_pieces(self, pieces: Generator[Any, Any, Any], whole: bool, position: Any) -> Generator[Any, Any, Any]:
        """A forward that is a generator: each piece runs when it is asked for, as a piece of the entry that it was called in."""
        resume = functools.partial(pieces.send, None)
        while True:
            try:
                with self.again(position):
                    output, position = resume(), self.position()
            except StopIteration as end:
                return self.finish(end.value, whole)
            try:
                resume = functools.partial(pieces.send, (yield self.finish(output, False)))
            except BaseException as error:  # which the caller throws in, also by closing
                resume = functools.partial(pieces.throw, error)

    def _recurrent(self, owner: nn.Module, inner: Forward) -> Forward:
        """Recurrent layers are fixed operators, and their forward compares dtypes before it calls a function."""
        here = self.here

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (self.running or here.running) or module is not owner:
                return inner(module, *args, **kwargs)
            return inner(module, *in_float32(args), **in_float32(kwargs))

        return forward

    def _aside(self, interception: Interception, owner: nn.Module, inner: Forward) -> Forward:
        """A module whose functions are not intercepted runs without the mode, which takes longer than most functions do."""
        here = self.here
        run: Forward = layer_norm if inner is nn.LayerNorm.forward and interception.promotes else inner

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (self.running or here.running) or module is not owner:
                return inner(module, *args, **kwargs)
            if torch.compiler.is_compiling() or not interception.step_out():
                return run(module, *args, **kwargs)
            try:
                return run(module, *args, **kwargs)
            finally:
                interception.step_in()

        return forward


_CALLER = nn.Module._call_impl.__code__.co_filename
"""Where PyTorch calls a module's forward; the module is ``self`` there."""


def _check_called(module: nn.Module) -> None:
    """A shallow copy has the forward of its original, and calls it with what the original has.

    Raises:
        PlanError: when a copy is called that has something else.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame.f_code.co_filename == _CALLER and (called := frame.f_locals.get("self")) is not module:
        _refuse_copy(called, module)


def _refuse_copy(called: Any, module: nn.Module) -> None:
    own, original = called.__dict__, module.__dict__
    if type(called) is not type(module) or own.get("forward") is not original.get("forward"):
        return
    if own.keys() != original.keys() or any(own[name] is not value for name, value in original.items()):
        raise PlanError(
            f"a shallow copy of a {type(module).__name__} under a plan is called (copy.copy, or a copied __dict__), which would "
            "compute with the parameters of its original: copy it with copy.deepcopy, which gives a plain model, or run the "
            "original with other parameters by torch.func.functional_call"
        )


@contextlib.contextmanager
def copies_refused() -> Iterator[None]:
    """Look at each module that is called for a while: inside an entry a copy of a part runs the operator of its original.

    Raises:
        PlanError: as the entry of a copy.
    """

    def look(module: nn.Module, args: Any) -> None:
        original, _ = getattr(module.__dict__.get("forward"), "qsync_replaced", (None, None))
        if original is not None and (owner := original()) is not module and owner is not None:
            _refuse_copy(module, owner)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def is_replaced(module: nn.Module) -> bool:
    """Whether an installation has replaced this module's forward (and not that of a module of which this is a copy)."""
    origin, _ = getattr(module.__dict__.get("forward"), "qsync_replaced", (None, None))
    return origin is not None and origin() is module


def forget_copied_forwards(model: nn.Module) -> None:
    """Give a copy of an applied model the forwards that the original had before; modules that are no copies stay as they are."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]  # what pickle makes of a replaced one
            continue
        origin, earlier = getattr(forward, "qsync_replaced", (None, None))
        if origin is None or origin() is module:
            continue
        while earlier is not None and hasattr(earlier, "qsync_replaced"):
            earlier = earlier.qsync_replaced[1]
        if earlier is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = types.MethodType(earlier, module)


@functools.cache
def _watch_scripting() -> None:
    """Have each model looked at that ``torch.jit.script`` compiles; once in a process."""
    module: Any = torch.jit._recursive
    create = module.create_script_module

    @functools.wraps(create)
    def create_script_module(nn_module: nn.Module, stubs_fn: Any, share_types: bool = True, is_tracing: bool = False) -> Any:
        if not is_tracing:
            forget_copied_forwards(nn_module)
            if any(map(is_replaced, nn_module.modules())):
                raise PlanError(
                    "torch.jit.script reads the source of a model, which has nothing of its plan: script a copy, which is in full "
                    "precision (torch.jit.script(copy.deepcopy(model))), or call remove() first"
                )
        return create(nn_module, stubs_fn, share_types, is_tracing)

    module.create_script_module = create_script_module
