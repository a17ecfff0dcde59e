"""Calls of ``F.linear``, ``F.conv2d`` and ``x @ weight`` in a model's own code, found by the identity of their weight."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.geometry import Pair

LINEAR, PRODUCT, CONV2D = "linear", "product", "conv2d"
"""Ways in which a model calls operators: ``F.linear``, the weight as the right factor of a product, ``F.conv2d``."""
OTHERWISE = "otherwise"
"""How it reads a weight where that is no operator: transposed, in ``einsum``."""


class OperatorCall(Protocol):
    """Stands where a model calls an adjustable operator."""

    def linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Run the operator where ``F.linear`` was called."""
        ...

    def conv2d(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """Run the operator where ``F.conv2d`` was called."""
        ...


@attrs.frozen
class WeightPlace:
    """A parameter's place in a model: parameters may be replaced by others (``load_state_dict(assign=True)``), places stay."""

    fqn: str
    module: nn.Module
    name: str

    @property
    def weight(self) -> torch.Tensor | None:
        """The parameter that is there now."""
        return self.module._parameters.get(self.name)


class _Repeated(threading.local):
    """Whether this thread runs a piece of an earlier forward again, in the backward of an autograd function, under gradients."""

    def __init__(self) -> None:
        self.repeats = self.by_gradient = self.had_gradients = False


class WeightCalls:
    """The operators that run in place of functional calls, by the weight of the call.

    Args:
        planned: places of weights and the calls that run with them.
        refused: places of weights with which a linear or convolution must not run, because a whole plan does not name it.
        model: whose weights they are.
        remedy: what to do where one is refused, or called otherwise than planned.
    """

    def __init__(
        self,
        planned: Sequence[tuple[WeightPlace, OperatorCall]],
        refused: Sequence[WeightPlace] = (),
        model: nn.Module | None = None,
        remedy: str = "",
    ) -> None:
        self.remedy = remedy
        self._model = model or nn.Module()
        self._stored: dict[int, torch.Tensor] | None = None
        self._calls_by_place = (*planned, *((place, RefusedCall(place.fqn, remedy)) for place in refused))
        self._found: dict[int, tuple[torch.Tensor, OperatorCall]] = {}
        self._at_start: list[int] = []
        self._traced: list[tuple[torch.Tensor | None, OperatorCall]] = []
        self._past: dict[int, tuple[weakref.ref[torch.Tensor], OperatorCall]] = {}
        self._ways: defaultdict[int, set[str]] = defaultdict(set)
        for place, call in planned:
            if isinstance(place.module, nn.Linear):
                self._ways[id(call)].add(LINEAR)
        self._here = _Repeated()
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._traced_casts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start_forward(self) -> None:
        """A forward begins: parameters may have been replaced since the last one.

        What it puts into their places itself (``torch.func.functional_call`` with weights that it computes) is none of them.
        """
        if torch.compiler.is_compiling():
            self._traced = [(place.weight, call) for place, call in self._calls_by_place]
            return
        self._stored = None
        weights = [id(place.module._parameters.get(place.name)) for place, _ in self._calls_by_place]
        if weights == self._at_start:
            return
        self._at_start = weights
        found = {id(weight): (weight, call) for place, call in self._calls_by_place if (weight := place.weight) is not None}
        for key, (replaced, call) in self._found.items():
            if key not in found:
                self._past[key] = (weakref.ref(replaced, lambda _, key=key: self._past.pop(key, None)), call)  # type: ignore[misc]
        self._found = found

    def end_forward(self) -> None:
        """Forget what a compiler traced; other casts are forgotten as they are freed: a checkpoint may run again with them."""
        self._traced.clear()
        self._traced_casts.clear()

    @contextmanager
    def repeating(self, by_gradient: bool) -> Iterator[None]:
        """While a piece of an earlier forward runs again; ``by_gradient``: in the backward of an autograd function."""
        here = self._here
        before = here.repeats, here.by_gradient, here.had_gradients
        here.repeats, here.by_gradient, here.had_gradients = True, by_gradient, torch.is_grad_enabled()
        try:
            yield
        finally:
            here.repeats, here.by_gradient, here.had_gradients = before

    def called(self, weight: object, way: str) -> OperatorCall | None:
        """What replaces a call with this weight that is made now, as ``F.linear``, ``F.conv2d`` or a product on its left.

        Raises:
            PlanError: when it cannot be told whether a call in a backward pass repeats one of the forward pass.
        """
        call = self.of(weight)
        if torch.compiler.is_compiling():
            return call
        if call is None and self._here.repeats and isinstance(weight, torch.Tensor):
            call = self._of_past(weight)
        if call is None:
            return None
        if not self._here.by_gradient:
            self._ways[id(call)].add(way)
            return call
        # Gradient formulas multiply with weights too, but otherwise: what has the gradient ``grad @ weight`` is a linear.
        ways = self._ways.get(id(call), set())
        if isinstance(call, RefusedCall) or way not in ways:
            return None
        if len(ways) > 1 and (self._here.had_gradients or not torch.is_grad_enabled()):
            raise PlanError(
                f"the backward of an autograd function multiplies with {self._fqn_of_call(call)}, which the model reads in two "
                "ways: as the weight of a linear, as a right factor, transposed, or in another product; whether this repeats the "
                "forward pass or is a formula cannot be told: checkpoint with torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=False), or leave the formula to autograd"
            )
        return call

    def read_otherwise(self, arguments: Iterable[Any]) -> None:
        """An autograd function of the user's reads these in its forward; its backward may multiply with weights among them."""
        for argument in arguments:
            if isinstance(argument, (list, tuple)):
                self.read_otherwise(argument)
            elif isinstance(argument, nn.Parameter) and not self._here.repeats and (call := self.of(argument)) is not None:
                self._ways[id(call)].add(OTHERWISE)

    def _of_past(self, weight: torch.Tensor) -> OperatorCall | None:
        """Find the call of a weight that a forward pass had and checkpointing uses again: replaced since, or detached."""
        past = self._past.get(id(weight))
        if past is not None and past[0]() is weight:
            return past[1]
        if weight.device.type == "meta" or not weight.numel():
            return None
        form = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        for place, call in self._calls_by_place:
            stored = place.weight
            if stored is None or stored is weight:  # which the forward has put there itself
                continue
            if form == (stored.data_ptr(), stored.shape, stored.stride(), stored.dtype):
                return call
        return None

    def of(self, weight: object) -> OperatorCall | None:
        """What replaces a call with this weight; None for one that no plan names."""
        if torch.compiler.is_compiling():
            return next((call for known, call in self._traced if known is weight), None) or self._of_place(weight)
        found = self._found.get(id(weight))
        if found is not None and found[0] is weight:
            return found[1]
        if (call := self._of_place(weight)) is not None:
            assert isinstance(weight, torch.Tensor)
            self._found[id(weight)] = weight, call
        return call

    def _of_place(self, weight: object) -> OperatorCall | None:
        """Parameters also come and go within a forward: fully_shard gathers those of each part when it runs."""
        if not isinstance(weight, nn.Parameter):
            return None
        return next((call for place, call in self._calls_by_place if place.weight is weight), None)

    def remember_cast(self, parameter: torch.Tensor, cast: torch.Tensor) -> None:
        """The model itself casts a parameter: to the format of an activation, which a plan may have changed."""
        if isinstance(self.of(parameter), RefusedCall):
            return  # no operator of the trace: the cast was there already
        if torch.compiler.is_compiling():
            self._traced_casts.append((cast, parameter))
        else:
            key = id(cast)
            self._casts[key] = (weakref.ref(cast, lambda _: self._casts.pop(key, None)), parameter)

    def uncast(self, x: Any) -> Any:
        """The parameter of which the model made this 16-bit cast; anything else as it is."""
        if torch.compiler.is_compiling():
            return next((parameter for cast, parameter in self._traced_casts if cast is x), x)
        found = self._casts.get(id(x))
        return x if found is None or found[0]() is not x else found[1]

    def fqn_of(self, weight: torch.Tensor) -> str:
        """The name of a weight for which there is a call."""
        call = self.of(weight) or self._of_past(weight)
        return "a weight" if call is None else self._fqn_of_call(call)

    def _fqn_of_call(self, call: OperatorCall) -> str:
        return next(place.fqn for place, known in self._calls_by_place if known is call)

    def is_stored(self, x: torch.Tensor) -> bool:
        """True for the model's parameters and buffers and their views: a product of such alone is no operator of a plan."""
        source = x if x._base is None else x._base
        if torch.compiler.is_compiling():
            # What is asked of the source here becomes a part of the graph, and fails where DistributedDataParallel cuts the graph
            # between x and its source.
            return any(source is tensor for tensor in (*self._model.parameters(), *self._model.buffers()))
        if not source.is_leaf:
            return False
        if self._stored is None:
            self._stored = {id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())}
        return self._stored.get(id(source)) is source


class RefusedCall:
    """Stands where a model calls an operator that its plan does not name."""

    def __init__(self, fqn: str, remedy: str) -> None:
        self._fqn, self._remedy = fqn, remedy

    def linear(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse.

        Raises:
            PlanError: naming the operator.
        """
        raise PlanError(
            f"{self._fqn} runs but the plan does not name it, so the plan was made for another model or for another way through "
            f"this one; {self._remedy}"
        )

    conv2d = linear


def may_call_functions(module: nn.Module) -> bool:
    """False for PyTorch's own leaves without parameters (ReLU, pooling, dropout), which run in any format."""
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or next(module.children(), None) is not None or next(module.parameters(recurse=False), None) is not None
