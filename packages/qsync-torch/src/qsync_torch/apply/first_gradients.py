"""The first gradients of planned weights: they tell of products that a script computes outside of every forward of the model.

A plan replaces what runs inside a forward of the model or of one of its modules.  A functional call in another method, which the
script calls itself (``training_step``), is inside none: it runs in full precision, and nothing is there to see it.  Its weight gets
a gradient all the same, and the graph of that backward pass says whether it comes from a product that the plan did not make, or
from elsewhere: an embedding that shares the weight, a penalty on its norm.  A weight is watched until its gradient has told enough,
which is in the first step: then nothing is left of this.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from qsync_core.ir.op_id import OpId
from qsync_torch.apply.functional_calls import WeightPlace
from qsync_torch.apply.recomputation import is_of_the_user

_PRODUCTS = frozenset(
    [
        *("Addmm", "Mm", "Linear", "MkldnnLinear", "Addmv", "Mv", "Addbmm", "Baddbmm", "Bmm", "Dot", "Convolution"),
        *("CudnnConvolution", "MkldnnConvolution", "MpsConvolution", "MiopenConvolution", "ConvolutionOverrideable"),
    ]
)
_VIEWS = frozenset(
    [
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Expand", "Clone"),
        *("Slice", "Select", "Split", "SplitWithSizes", "Unbind", "AsStrided"),
    ]
)
_CASTS = frozenset(["ToCopy"])
"""What autograd calls products, views and casts, without ``Backward0``."""


Look = Callable[[OpId, WeightPlace, torch.Tensor], bool]


class FirstGradients:
    """Watches weights until their gradients have told enough.

    Args:
        places: weights, by their operator.
        look: called with an operator, its weight's place and the weight, when its gradient has come for the 1st, 2nd, 4th, 8th, ...
            time; True where that is enough.
    """

    def __init__(self, places: Iterable[tuple[OpId, WeightPlace]], look: Look) -> None:
        self._look = look
        self._handles: dict[OpId, RemovableHandle] = {}
        self._times: dict[OpId, int] = {}
        self._consumers: dict[Any, list[Any]] = {}
        self._places = dict(places)
        this = weakref.ref(self)  # a weight's hooks are no part of what Python's collector of cycles sees
        for op_id, place in self._places.items():
            weight = place.weight
            if weight is not None and weight.is_leaf and weight.requires_grad:
                hook = functools.partial(_arrived, this, op_id)
                self._handles[op_id] = weight.register_post_accumulate_grad_hook(hook)

    def stop(self) -> None:
        """Watch no more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def arrived(self, op_id: OpId, weight: torch.Tensor) -> None:
        """A gradient has come."""
        times = self._times[op_id] = self._times.get(op_id, 0) + 1
        if (
            times & (times - 1) == 0
            and self._look(op_id, self._places[op_id], weight)
            and (handle := self._handles.pop(op_id, None))
        ):
            handle.remove()

    def product_of(self, weight: torch.Tensor, *, casts: bool, functions: bool) -> str:
        """Which product the weight's gradient comes from, in the backward pass that runs now; empty where it is none.

        Args:
            weight: a leaf.
            casts: whether products of a 16-bit copy count.
            functions: whether autograd functions of the user's count.
        """
        through = _VIEWS | _CASTS if casts else _VIEWS
        todo = [node for node in self._graph() if getattr(node, "variable", None) is weight]
        while todo:
            for node in self._consumers.get(todo.pop(), ()):
                name: str = node.name()
                kind = name.rpartition("Backward")[0]
                if functions and is_of_the_user(node) if isinstance(node, BackwardCFunction) else kind in _PRODUCTS:
                    return name
                if kind in through:
                    todo.append(node)
        return ""

    def _graph(self) -> dict[Any, list[Any]]:
        """The nodes of the backward pass that runs now, and what each gets its gradients from; kept until it ends."""
        if not self._consumers:
            torch.autograd.Variable._execution_engine.queue_callback(self._consumers.clear)
            todo, seen = _roots(), set()
            while todo:
                node = todo.pop()
                if node in seen:
                    continue
                seen.add(node)
                for following, _ in node.next_functions:
                    if following is not None:
                        self._consumers.setdefault(following, []).append(node)
                        todo.append(following)
        return self._consumers


def _arrived(watch: weakref.ref[FirstGradients], op_id: OpId, weight: torch.Tensor) -> None:
    # Compiled autograd traces what hooks do, and has no backward pass to look at yet.
    if (gradients := watch()) is not None and not torch.compiler.is_compiling():
        gradients.arrived(op_id, weight)


def _roots() -> list[Any]:
    """Where the backward passes that run now began; on a GPU other threads than this one have called them."""
    code = torch.autograd.graph._engine_run_backward.__code__
    found = []
    innermost: Any
    for innermost in sys._current_frames().values():
        frame: Any = innermost
        while frame is not None:
            if frame.f_code is code:
                outputs = frame.f_locals["t_outputs"]
                found += [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
            frame = frame.f_back
    innermost = None  # one of them is this one: it would keep itself, and with its callers the graph
    return [node for node in found if node is not None]
