"""Which random numbers a step takes: they follow from the rank, the optimizer steps so far, and the data that is rounded.

No forward is counted, so a piece of one that runs again (gradient checkpointing of any make, a second pass over a batch) rounds as
it did before.  The number is a tensor on each device, which an optimizer's step advances there: eager code, compiled graphs and
replays of CUDA graphs read it when they run.  On a CPU Python sees the same eight bytes, so that eager code need not ask a tensor
(docs/decisions/counter-based-random-numbers.md).
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsync_core.errors import PlanError
from qsync_torch.aten.random_bits import Offset
from qsync_torch.operators.channel_factors import ChannelFactors
from qsync_torch.torch_internals import at_end_of_backward, running_node, version_of

STEP_STRIDE = 1 << 32
"""Offset between two steps: a kernel may count its random numbers up from the offset, one per element."""
LARGEST_STEP = (1 << 29) - 1
"""The largest step to go on from: the offset has 63 bits, and as many steps are left."""
_KEYS = 1 << 62

_OFFSETS: list[torch.Tensor] = []
"""The offsets of all plans in force, on all devices: what a compiled optimizer advances, and one of which no model is known."""
_FACTORS: list[ChannelFactors] = []
"""Likewise the factors of their operators' channels."""
_GONE: list[tuple[list[torch.Tensor], ChannelFactors]] = []
"""What plans that are collected leave in both, which must not change while a compiler reads them: the collector may come then."""


class StepKey:
    """The offset of a rank's random numbers: ``key + STEP_STRIDE * steps``.

    Args:
        key: of the seed and the rank.
        model: whose optimizers count.

    Attributes:
        ends: called when a step of the model has ended, outside of compiled code.
        factors: of the operators' input channels, which advance with the step.
    """

    def __init__(self, key: int, model: nn.Module) -> None:
        self._key, self._memory, self._model = key % _KEYS, array("q", [key % _KEYS]), weakref.ref(model)
        self.ends: list[Callable[[], None]] = []
        self.factors = ChannelFactors()
        self._is_known = False
        with torch.inference_mode(False):
            self._on_cpu = torch.frombuffer(self._memory, dtype=torch.int64).view(())
        self._on_gpu: dict[torch.device, torch.Tensor] = {}
        self._own = [self._on_cpu]
        _let_go()
        _OFFSETS.append(self._on_cpu)
        _FACTORS.append(self.factors)
        _IN_FORCE.add(self)
        _KNOWN.clear()
        weakref.finalize(self, _GONE.append, (self._own, self.factors))

    def release(self) -> None:
        """Count no more: the plan is removed."""
        _IN_FORCE.discard(self)
        _KNOWN.clear()
        _forget(self._own, self.factors)

    def rekey(self, key: int) -> None:
        """Take another rank's or seed's numbers, in the same step."""
        step = self.step
        self._key = key % _KEYS
        self.step = step

    def on(self, device: torch.device) -> torch.Tensor:
        """The offset on a device, read when kernels run.

        Raises:
            PlanError: where it is asked for first while a CUDA graph is captured.
        """
        if device.type != "cuda":
            return self._on_cpu
        found = self._on_gpu.get(device)
        return self._move_to(device) if found is None else found

    def now(self, device: torch.device) -> Offset:
        """The offset for eager code: a number on a CPU."""
        return self._memory[0] if device.type == "cpu" else self.on(device)

    def mark(self, device: torch.device) -> int:
        """A number that differs from step to step, by which a copy is known to be this step's."""
        return self._memory[0] if device.type == "cpu" else version_of(self.on(device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _move_to(self, device: torch.device) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():  # whose replays would begin to count anew each time
            raise PlanError("the first step under a plan is captured in a CUDA graph: run a step before one is captured")
        with torch.inference_mode(False):
            offset = self._on_gpu[device] = torch.full((), self._memory[0], dtype=torch.int64, device=device)
        self._own.append(offset)
        _OFFSETS.append(offset)
        return offset

    @property
    def step(self) -> int:
        """How many optimizer steps there were.  Reading it waits for a GPU, where replayed graphs may have advanced it."""
        offset = next(iter(self._on_gpu.values()), self._on_cpu)
        return (int(offset) - self._key) // STEP_STRIDE

    @step.setter
    def step(self, value: int) -> None:
        for offset in self._own:
            offset.fill_(self._key + value * STEP_STRIDE)

    def later(self) -> Callable[[], int]:
        """The present step, for a caller who asks for it later, when the device has come here."""
        if not self._on_gpu:
            step = self.step
            return lambda: step
        key, offset = self._key, next(iter(self._on_gpu.values())).clone()
        return lambda: (int(offset) - key) // STEP_STRIDE

    def advance(self) -> None:
        """Say that a step has ended."""
        with torch.no_grad():
            for offset in self._own:
                offset.add_(STEP_STRIDE)
        self.factors.advance()

    def holds(self, parameters: Collection[int]) -> bool:
        """Whether a parameter of the model is among these, given by ``id``: its optimizer is known from then on."""
        model = self._model()
        found = model is not None and any(id(parameter) in parameters for parameter in model.parameters())
        self._is_known = self._is_known or found
        return found

    @property
    def counts_any(self) -> bool:
        """Whether no optimizer is known that holds the model's parameters: one with copies of them may be its own."""
        return not self._is_known


_IN_FORCE: weakref.WeakSet[StepKey] = weakref.WeakSet()
_KNOWN: weakref.WeakKeyDictionary[Any, tuple[int, list[weakref.ref[StepKey]]]] = weakref.WeakKeyDictionary()
"""How many parameters an optimizer holds, and the plans that its steps count for; found anew when it gets more, or a plan comes
into force or is removed."""
_PENDING: set[StepKey] = set()
"""Plans of which a step has ended inside the backward pass that runs."""

_STEPS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many steps of an optimizer have ended, and of those that it steps."""


def _let_go() -> None:
    """Forget what plans have left that are gone."""
    while _GONE:
        _forget(*_GONE.pop())


def _forget(own: list[torch.Tensor], factors: ChannelFactors) -> None:
    _FACTORS[:] = [one for one in _FACTORS if one is not factors]
    _OFFSETS[:] = [offset for offset in _OFFSETS if not any(offset is one for one in own)]


def _plans_of(optimizer: Any) -> list[StepKey]:
    """The plans whose parameters an optimizer holds; where it holds none (but copies in float32), those of which none is known."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    counted, known = _KNOWN.get(optimizer, (-1, []))
    if counted != count:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known = [weakref.ref(key) for key in _IN_FORCE if key.holds(held)]
        _KNOWN[optimizer] = count, known
    return [key for reference in known if (key := reference()) is not None] or [key for key in _IN_FORCE if key.counts_any]


def _steps_inside(optimizer: Any) -> bool:
    """Whether the step that has ended was one of an optimizer inside this one, which has counted it (ZeroRedundancyOptimizer)."""
    inside = sum(_STEPS.get(part, 0) for part in vars(optimizer).values() if isinstance(part, torch.optim.Optimizer))
    before, _STEPS[optimizer] = _STEPS.get(optimizer, 0), inside or _STEPS.get(optimizer, 0) + 1
    return inside > before


def _ended(optimizer: Any, *_: Any) -> None:
    """Count a step; one inside a backward pass when that ends: what the pass computes again rounds as it did before."""
    if torch.compiler.is_compiling():
        for offset in _OFFSETS:
            offset.add_(STEP_STRIDE)
        for factors in _FACTORS:
            factors.advance()
        return
    _let_go()
    if not _IN_FORCE or _steps_inside(optimizer):
        return
    keys = _plans_of(optimizer)
    try:
        at_end_of_backward(_count_pending)
        _PENDING.update(keys)
    except RuntimeError:  # outside of every backward pass
        for key in keys:
            key.advance()
    for key in keys:
        for end in key.ends:
            end()


def _count_pending() -> None:
    """Many optimizers may step in one pass, and it counts once; a pass inside another one (a reentrant checkpoint's), when that
    ends.
    """
    outer = running_node()
    following = [] if outer is None else [node for node, _ in outer.next_functions if node is not None]
    if following:
        _count_at_end_of(following)
    while _PENDING and not following:
        _PENDING.pop().advance()


def _count_at_end_of(nodes: Sequence[torch.autograd.graph.Node]) -> None:
    """Count when the backward pass ends that runs one of these next."""

    def before(_: Any) -> None:
        for hook in hooks:
            hook.remove()
        at_end_of_backward(_count_pending)

    hooks = [node.register_prehook(before) for node in nodes]


register_optimizer_step_post_hook(_ended)
