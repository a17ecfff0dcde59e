"""Outputs in containers and changed ones; errors in the middle of a step, and the step after them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import QSyncError
from qsync_torch import apply_
from robustness.reference import Reference
from robustness.wrong.two import BOTH, INT8, Pair, Two, batch, gradients, plain, plan, refused_only, same, script, step


@dataclasses.dataclass
class Result:
    """A dataclass of outputs."""

    logits: torch.Tensor


def unpacked(get: Callable[[Any], torch.Tensor], wrap: Callable[[torch.Tensor], Any]) -> Pair:
    """A model that wraps its output."""
    model, dtypes = Two(lambda model, x: wrap(model.body(x))), []
    apply_(model, plan())
    y = get(model(batch()))
    dtypes.append(y.dtype)
    y.float().square().sum().backward()
    return [torch.tensor(dtypes == [torch.float32]), *gradients(model)], [torch.tensor(True), *same()[1][1:]]


@script()
def output_in_a_dataclass() -> Pair:
    return unpacked(lambda r: r.logits, Result)


@script()
def output_in_a_class_of_ones_own() -> Pair:
    class Own:
        def __init__(self, y: Any) -> None:
            self.y = [y]

    return unpacked(lambda r: r.y[0], Own)


@script()
def output_in_a_dict_of_tuples() -> Pair:
    return unpacked(lambda r: r["y"][0][0], lambda y: {"y": ((y, 1), None)})


@script()
def output_of_a_generator() -> Pair:
    return unpacked(lambda r: next(iter(r)), lambda y: (part for part in [y]))


@script()
def output_of_a_generator_function() -> Pair:
    def body(model: Any, x: torch.Tensor) -> Any:
        yield model.body(x)

    model = Two(body)
    apply_(model, plan())
    (y,) = list(model(batch()))
    y.float().square().sum().backward()
    return [y.detach().float(), *gradients(model)], same()[1]


@script()
def output_of_an_iterator() -> Pair:
    return unpacked(lambda r: next(r), lambda y: iter([y]))


@script()
def output_in_a_closure() -> Pair:
    return unpacked(lambda r: r(), lambda y: lambda: y)


@script()
def output_in_a_partial() -> Pair:
    return unpacked(lambda r: r(), lambda y: functools.partial(torch.clone, y))


@script()
def bias_in_bfloat16() -> Pair:
    def make() -> Any:
        model = Two()
        model.a.bias = nn.Parameter(model.a.bias.detach().bfloat16())
        return model

    return refused_only(step, make)


@script()
def output_is_a_view() -> Pair:
    return same(make=lambda: Two(lambda model, x: model.body(x)[:, 2:].t()))


@script()
def output_changed_in_place() -> Pair:
    def run(model: Any) -> Any:
        y = model(batch())
        y.mul_(2)
        y.float().square().sum().backward()
        return gradients(model)

    return same(run)


@script()
def input_changed_in_place_between_operators() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = model.a(x)
        x.mul_(3)
        return model.b(y.relu()) + model.a(x)

    return same(make=lambda: Two(body))


@script()
def weight_changed_inside_the_forward() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.a.weight.mul_(2)
        return model.body(x)

    return same(make=lambda: Two(body))


@script()
def empty_batch() -> Pair:
    return same(lambda model: step(model, batch()[:0]))


def after_an_error(error: type[BaseException]) -> Pair:
    """A step fails in the middle; the next is as ever."""

    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.a(x)
        if model.fails:
            model.fails = False
            raise error
        return model.b(y.relu())

    def make() -> Any:
        model = Two(body)
        model.fails = False
        return model

    def run(model: Any) -> Any:
        model.fails = True
        with contextlib.suppress(error):
            model(batch(3))
        outside = model.a(batch()).detach() if not model.training else step(model)
        return [outside, F.linear(batch(), model.a.weight).detach()]

    return same(run, make)


@script()
def an_exception_inside_the_forward() -> Pair:
    return after_an_error(ValueError)


@script()
def interrupted_inside_the_forward() -> Pair:
    model = Two()
    twin = Two()

    class Stop(KeyboardInterrupt):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    apply_(model, plan())
    handle = model.b.register_forward_pre_hook(stop)
    with contextlib.suppress(Stop):
        model(batch())
    handle.remove()
    run = lambda model: [step(model), F.linear(batch(), model.a.weight).detach()]  # noqa: E731
    found = run(model)
    with Reference(twin, BOTH).running():
        return found, run(twin)


@script()
def an_error_in_the_backward() -> Pair:
    def run(model: Any) -> Any:
        def fail(_: Any) -> None:
            raise ValueError

        y = model(batch(5))
        y.register_hook(fail)
        with contextlib.suppress(ValueError):
            y.square().sum().backward()
        return step(model)

    return same(run)


@script()
def refused_then_used() -> Pair:
    model = Two()
    with contextlib.suppress(QSyncError):
        apply_(model, plan({**BOTH, "c": INT8}))
    return step(model), plain(step)
