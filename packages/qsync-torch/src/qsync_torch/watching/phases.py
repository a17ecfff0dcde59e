"""The phases of a rank's training steps, from hooks that PyTorch offers; nothing of PyTorch's is replaced or synchronised.

A step goes from the moment at which DistributedDataParallel has all gradients to the next such moment, so that the same step of
all ranks ends in the same exchange.  Between two moments that are marked, all time is of the phase that the earlier one begins.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from qsync_core.errors import JobError
from qsync_torch.distributed.communication import BUFFERS
from qsync_torch.torch_internals import at_end_of_backward, pytree
from qsync_torch.watching.hooks import OwnHook, OwnPreHook
from qsync_torch.watching.moments import Moment, between_ns, has_passed, now


class Phase(enum.StrEnum):
    """What a rank does.

    INPUT is the data, and whatever else the loop does between the optimizer and the next forward; FORWARD has the loss in it;
    OPTIMIZER has clipping in it, and all else behind the gradients.  COMMUNICATION is what this rank itself does for the exchange:
    copying gradients into buckets, and what a communication hook does before it returns.  WAIT is the exchange that no computation
    hides, and waiting for other ranks.
    """

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    WAIT = "wait"


@attrs.frozen
class StepPhases:
    """One step.

    Attributes:
        phases_ns: how long each phase took, all together the step.
        received_ns: when all gradients were there, on the clock that the processes of one machine share; 0 on a GPU.
    """

    phases_ns: Mapping[Phase, int]
    received_ns: int


_LOOKED_AT = 3
"""Steps in which it is seen behind which parameters' gradients buckets are sent."""
_SENDERS, _SHARE = 64, 0.25
"""Parameters, at most, whose gradients are looked at afterwards: those behind which the wrapper does this share of the most."""
_OUTPUTS = 8
"""Outputs, at most, that are asked when backward begins."""
_MARKS = 100_000
"""Marks, at most, of one step: forwards that no backward pass follows end none."""


class PhaseTimer:
    """Times the steps of models in DistributedDataParallel, and tells each once its times are known, on a GPU some steps late.

    Args:
        models: what the loop calls: wrappers, or what ``torch.compile`` makes of them.  A step is one of the first.
        tell: called with each step.
        between: called where a step's forward begins, with nothing pending; what it takes is nobody's.

    Raises:
        JobError: where a model is in no DistributedDataParallel.
    """

    def __init__(self, models: Sequence[nn.Module], tell: Callable[[StepPhases], None], between: Callable[[], None]) -> None:
        self._tell, self._between = tell, between
        self._handles: list[Any] = []
        wrappers = [wrapper_in(model) for model in models]
        self._device = next((p.device for p in wrappers[0].parameters()), torch.device("cpu"))
        self._marks: list[tuple[Phase, Moment]] = []
        self._finished: deque[tuple[list[tuple[Phase, Moment]], Moment]] = deque()
        self._in_backward = False
        self._syncs = False
        self._running: weakref.ref[DistributedDataParallel] | None = None
        self._inner_tells: set[weakref.ref[DistributedDataParallel]] = set()
        self._optimizer_steps = True
        self._is_own: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        parameters = [p for wrapper in wrappers for p in wrapper.parameters() if p.requires_grad]
        self._own = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        self._senders = _Senders(parameters, self._mark)
        for model, wrapper in zip(models, wrappers, strict=True):
            is_first, alive = wrapper is wrappers[0], weakref.ref(wrapper)  # which is not to outlive the script's own reference
            self._handles += [
                model.register_forward_pre_hook(OwnHook(lambda module, args, alive=alive: self._begin(alive()))),
                model.register_forward_hook(OwnHook(lambda module, args, output, f=is_first: self._end(output, f))),
            ]
            if getattr(wrapper, BUFFERS) and any(True for _ in wrapper.module.buffers()):
                self._handles.append(wrapper.module.register_forward_pre_hook(OwnPreHook(lambda module, args: self.computes())))
        for register, method in (
            (register_optimizer_step_pre_hook, self._optimize),
            (register_optimizer_step_post_hook, self._optimized),
        ):
            self._handles.append(handle := register(_weakly(method)))
            weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Take all hooks out again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._senders.close()

    def computes(self) -> None:
        """Called in a forward, once buffers have come from another rank, for which DistributedDataParallel waits."""
        if not torch.compiler.is_compiling() and self._marks and self._marks[-1][0] in (Phase.WAIT, Phase.FORWARD):
            if self._running is not None:
                self._inner_tells.add(self._running)
            self._mark(Phase.FORWARD)

    def _mark(self, phase: Phase) -> None:
        if len(self._marks) >= _MARKS:
            self._marks.clear()
        self._marks.append((phase, now(self._device)))

    def _begin(self, wrapper: DistributedDataParallel | None) -> None:
        if (
            wrapper is None
            or torch.compiler.is_compiling()
            or not (wrapper.training and torch.is_grad_enabled())
            or self._is_captured()
        ):
            return
        self._in_backward = False  # a pass that raised has left it
        self._running = weakref.ref(wrapper)
        self._syncs = wrapper.require_backward_grad_sync
        self._mark(Phase.WAIT)
        self._between()
        if self._running not in self._inner_tells:
            self._mark(Phase.FORWARD)

    def _end(self, output: Any, is_first: bool) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._marks:
            return
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        begin = _BackwardBegins(self, self._syncs and is_first)
        for tensor in tensors[:_OUTPUTS]:
            tensor.register_hook(begin)

    def begin_backward(self, ends_step: bool) -> None:
        """Called by the first gradient of a pass that reaches an output; several calls in a pass are one."""
        if self._in_backward or not self._handles or self._is_captured():  # or closed
            return
        self._in_backward = True
        self._mark(Phase.BACKWARD)

        def computed() -> None:
            """All of this rank's backward is issued; DistributedDataParallel's own callback, which waits, is called next."""
            self._mark(Phase.WAIT)
            at_end_of_backward(received)

        def received() -> None:
            self._in_backward = False
            self._mark(Phase.OPTIMIZER if self._optimizer_steps else Phase.INPUT)
            if ends_step:
                self._finish()

        at_end_of_backward(computed)

    def _finish(self) -> None:
        phase, end = self._marks[-1]
        self._finished.append((self._marks, end))
        self._marks, self._optimizer_steps = [(phase, end)], False
        self._senders.step()
        while self._finished and has_passed(self._finished[0][1]):
            marks, end = self._finished.popleft()
            phases: Counter[Phase] = Counter()
            for (what, begin), (_, then) in itertools.pairwise(marks):
                phases[what] += between_ns(begin, then)
            self._tell(StepPhases(phases, end if isinstance(end, int) else 0))

    def _optimize(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_backward and self._marks and self._owns(optimizer):
            self._mark(Phase.OPTIMIZER)

    def _optimized(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_backward and self._marks and self._owns(optimizer):
            self._optimizer_steps = True
            self._mark(Phase.INPUT)

    def _owns(self, optimizer: Optimizer) -> bool:
        found = self._is_own.get(optimizer)
        if found is None:
            known = ((p, self._own.get(id(p))) for group in optimizer.param_groups for p in group["params"])
            found = any(own is not None and own() is p for p, own in known)
            self._is_own[optimizer] = found
        return found

    def _is_captured(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@attrs.frozen
class _BackwardBegins:
    """A hook of the outputs of one forward."""

    times: PhaseTimer
    ends_step: bool

    def __call__(self, gradient: torch.Tensor) -> None:
        self.times.begin_backward(self.ends_step)


class _Senders:
    """Marks what DistributedDataParallel does in its own hooks behind gradients: it copies them, and sends a bucket that is full.

    A parameter's own hook runs before the wrapper's, and one of its node in autograd's graph, made later, behind it.  In the first
    steps all parameters have both; then those alone behind which buckets are sent: a call of Python between two kernels takes tens
    of microseconds, because nothing that it needs is in a cache.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mark: Callable[[Phase], None]) -> None:
        self._mark = mark
        self._took: Counter[int] = Counter()
        self._least: dict[int, int] = {}
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._steps = 0
        self._since_ns = 0
        for parameter in parameters:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            key = id(parameter)
            self._handles[key] = (
                parameter.register_post_accumulate_grad_hook(self._before),
                node.register_hook(lambda *_, key=key: self._after(key)),
            )

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        if self._steps > _LOOKED_AT:
            return
        if self._steps > 1:  # the buckets of the first step are others; and any step may be held up once
            self._least = {key: min(self._least.get(key, took), took) for key, took in self._took.items()}
        self._took.clear()
        if self._steps == _LOOKED_AT:
            enough = _SHARE * max(self._least.values(), default=0)
            senders = [key for key, least in self._least.items() if least >= enough]
            kept = set(heapq.nlargest(_SENDERS, senders, key=lambda key: self._least[key]))
            for key in self._handles.keys() - kept:
                for handle in self._handles.pop(key):
                    handle.remove()

    def close(self) -> None:
        """Take the hooks out again."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def _before(self, parameter: torch.Tensor) -> None:
        self._mark(Phase.COMMUNICATION)
        self._since_ns = time.perf_counter_ns()

    def _after(self, key: int) -> None:
        self._took[key] += time.perf_counter_ns() - self._since_ns
        self._mark(Phase.BACKWARD)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method for as long as its object lives: hooks of all optimizers are kept by PyTorch, and would keep the model."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := found()) is not None:
            alive(*args)

    return call


def wrapper_in(model: nn.Module) -> DistributedDataParallel:
    """The wrapper that a loop calls, also where it is compiled.

    Raises:
        JobError: where there is none.
    """
    found = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
    if found is None:
        raise JobError(
            f"qsync.watch compares ranks by the steps of a DistributedDataParallel, and this {type(model).__name__} is in none: "
            "call it on what the loop calls, after DistributedDataParallel(model)"
        )
    return found
