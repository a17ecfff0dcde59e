"""The model of the scripts, plans for it, and a run under one beside what is expected of it."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from robustness.reference import SUMS, Reference, sums_by

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32, rounding=Rounding.NEAREST)
BFLOAT16, FLOAT32 = Variant.parse("bfloat16"), Variant.parse("float32")
BOTH = {"a": INT8, "b": BFLOAT16}
BASE = {"a": FLOAT32, "b": FLOAT32}
AMP = {"a": BFLOAT16, "b": BFLOAT16}
WIDTH = 16
TOLERANCE = 1e-4
"""Relative to a tensor's norm; one operator in another format moves results by 1e-3 and more."""

Pair = tuple[Any, Any]
SCRIPTS: dict[str, tuple[Callable[[], Pair], tuple[type[BaseException], ...]]] = {}


def script(*refusals: type[BaseException]) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    """Enters a script; ``refusals`` are errors of PyTorch that say clearly what is wrong."""

    def enter(function: Callable[[], Pair]) -> Callable[[], Pair]:
        SCRIPTS[function.__name__] = (function, refusals)
        return function

    return enter


def plan(variants: Mapping[str, Variant] = BOTH, base: Precision = Precision.FLOAT32, **changes: Any) -> PrecisionPlan:
    """A whole plan with one group."""
    entries = {OpId(fqn): Assignment(variant, "aten", "", "") for fqn, variant in variants.items()}
    group = GroupPlan("infer", Role.INFER, 1, DeviceType("cpu", DeviceKind.CPU), base, entries)
    return PrecisionPlan(
        model="two", dag_digest="", operator_ids=tuple(entries), input_digests={}, solver="greedy", indicator="lossvar",
        time_limit_ns=1, predicted_iteration_ns=1, objective=0.0, bound=None, groups=(group,), rank0_group="infer", base=base,
        **changes,
    )  # fmt: skip


class Two(nn.Module):
    """Two layers; ``body`` is what a script does in place of its own."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any] | None = None, width: int = WIDTH) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.way = body

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) if self.way is None else self.way(self, x)


def batch(seed: int = 1, size: int = 4) -> torch.Tensor:
    """Inputs (size, width)."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Of all parameters, copied."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def step(model: Any, x: torch.Tensor | None = None) -> list[Any]:
    """Output and gradients of one step."""
    model.zero_grad()
    y = model(batch() if x is None else x).float()
    y.square().sum().backward()
    return [y.detach(), *gradients(model)]


def first_step(model: nn.Module, run: Callable[[Any], Any] = step) -> tuple[Any, list[str]]:
    """What the first training step of a model gives, and what is said until its optimizer has stepped.

    Args:
        model: under a plan.
        run: makes gradients; the optimizer changes nothing.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(model)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    return found, [str(one.message) for one in said]


def did_not_run(said: list[str], *op_ids: str) -> bool:
    """Whether a warning names these operators, and no other, as lowered by the plan and not run."""
    return any(one.startswith(f"the plan lowers {', '.join(op_ids)}, which the first step did not run") for one in said)


def same(
    run: Callable[[Any], Any] = step, make: Callable[[], Any] = Two, variants: Mapping[str, Variant] = BOTH, **options: Any
) -> Pair:
    """The same run of a model under a plan, and of a plain one under the reference."""
    model, twin = make(), make()
    apply_(model, plan(variants), **options)
    found = run(model)
    with Reference(twin, variants).running():
        return found, run(twin)


def plain(run: Callable[[Any], Any], make: Callable[[], Any] = Two) -> Any:
    """The run without any plan."""
    return run(make())


def autocast(dtype: torch.dtype = torch.bfloat16, device: str = "cpu", enabled: bool = True) -> Any:
    """PyTorch's."""
    return torch.autocast(device, dtype, enabled=enabled)


def inside(context: Callable[[], Any], run: Callable[[Any], Any] = step) -> Callable[[Any], Any]:
    """A run in a context."""

    def within(model: Any) -> Any:
        with context():
            return run(model)

    return within


def refused_only(
    run: Callable[[Any], Any], make: Callable[[], Any] = Two, variants: Mapping[str, Variant] = BOTH, **changes: Any
) -> Pair:
    """A script with no right result: if it ends, the plan was silently not kept."""
    model = make()
    apply_(model, plan(variants, **changes))
    return run(model), "a refusal"


@contextlib.contextmanager
def one_rank() -> Any:
    """A process group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def twice(model: Any) -> Any:
    """Two forwards, one backward."""
    (model(batch(1)).float().square().sum() + model(batch(2)).float().square().sum()).backward()
    return gradients(model)


def with_functions(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The body, by functional calls."""
    return F.linear(F.linear(x, model.a.weight, model.a.bias).relu(), model.b.weight, model.b.bias)


class Silent(Exception):
    """Other numbers without a word."""


def compare(found: Any, expected: Any) -> None:
    """Raises Silent where they differ."""
    if isinstance(expected, str):
        raise Silent(f"{expected} was expected, and the script ended")
    left, right = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    if len(left) != len(right):
        raise Silent(f"{len(left)} values, {len(right)} expected")
    for index, (one, two) in enumerate(zip(left, right, strict=True)):
        if one is None or two is None:
            if one is not two:
                raise Silent(f"value {index} is {one}, {two} expected")
            continue
        if one.shape != two.shape or one.dtype is not two.dtype:
            raise Silent(f"value {index} is {one.dtype} {tuple(one.shape)}, {two.dtype} {tuple(two.shape)} expected")
        error = (one.double() - two.double()).norm().item() / max(two.double().norm().item(), 1e-30)
        if not error <= TOLERANCE:
            raise Silent(f"value {index} differs by {error:.1e}")


def compare_with_either(function: Callable[[], Pair]) -> None:
    """Raises Silent where the values differ from both references'."""
    for who in SUMS:
        try:
            with sums_by(who):
                return compare(*function())
        except Silent as error:
            silent = error
    raise silent
