"""T2: wrong and unusual training scripts: each must be refused in one sentence, or compute what an independent reference computes.

A script is a small function. What it returns is compared: values that the model under a plan gave, and those of a plain model,
run in the same way under :mod:`reference` or, where no plan should be in force, as it is. A script that ends with an error of
QSync is refused; of PyTorch's own errors only those count that the script names. Everything else is a failure: other numbers
without a word are silent, other errors are tracebacks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attrs
import torch
import torch.nn.functional as F
from results import write_rows
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import QSyncError
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
    """Two layers; ``around`` is what a script does with its body."""

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


# Autocast


@script()
def autocast_bfloat16_around_a_float32_plan() -> Pair:
    return refused_only(inside(autocast))


@script()
def autocast_around_an_all_float32_plan() -> Pair:
    return refused_only(inside(autocast), variants=BASE)


@script()
def autocast_float16() -> Pair:
    return refused_only(inside(lambda: autocast(torch.float16)))


@script()
def autocast_disabled() -> Pair:
    return same(inside(lambda: autocast(enabled=False)))


@script()
def autocast_of_another_device() -> Pair:
    return same(inside(lambda: autocast(device="cuda", enabled=False)))


@script()
def autocast_inside_the_model() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return model.body(x)

    return refused_only(step, lambda: Two(body))


@script()
def autocast_inside_around_one_operator() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.a(x).relu()
        with autocast():
            return model.b(x)

    return refused_only(step, lambda: Two(body))


@script()
def autocast_nested_off_again_inside() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(), autocast(enabled=False):
            return model.body(x)

    return same(make=lambda: Two(body))


@script()
def autocast_plan_without_autocast() -> Pair:
    return refused_only(step, variants=AMP, base=Precision.BFLOAT16)


@script()
def autocast_plan_under_float16() -> Pair:
    return refused_only(inside(lambda: autocast(torch.float16)), variants=AMP, base=Precision.BFLOAT16)


@script()
def autocast_plan_turned_off_inside() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=False):
            return model.body(x)

    model = Two(body)  # nothing is lowered: it runs as it is
    apply_(model, plan(AMP, Precision.BFLOAT16))
    return inside(autocast)(model), plain(inside(autocast), lambda: Two(body))


@script()
def autocast_lowering_plan_turned_off_inside() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=False):
            return model.body(x)

    lowered = attrs.evolve(INT8, output=Precision.BFLOAT16)
    return refused_only(inside(autocast), lambda: Two(body), {**AMP, "a": lowered}, base=Precision.BFLOAT16)


@script()
def autocast_plan_under_its_autocast() -> Pair:
    model = Two()
    apply_(model, plan(AMP, Precision.BFLOAT16))
    return inside(autocast)(model), plain(inside(autocast))


@script()
def autocast_in_the_second_step_only() -> Pair:
    return refused_only(lambda model: (step(model), inside(autocast)(model)))


@script()
def autocast_around_eval() -> Pair:
    run = inside(autocast, lambda model: model.eval()(batch()).detach())
    model = Two()
    apply_(model, plan())
    return run(model), plain(run)


@script()
def autocast_around_the_loss_only() -> Pair:
    def run(model: Any) -> Any:
        y = model(batch()).float()
        with autocast():
            y.square().sum().backward()
        return gradients(model)

    return same(run)


# Settings, shapes, other models


@script()
def another_matmul_precision() -> Pair:
    software = {"infer": {"float32_matmul": "highest"}}
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        return refused_only(step, software=software)
    finally:
        torch.set_float32_matmul_precision(before)


@script()
def settings_changed_after_apply() -> Pair:
    before = torch.get_float32_matmul_precision()

    def run(model: Any) -> Any:
        torch.set_float32_matmul_precision("medium")
        return step(model)

    try:
        return refused_only(run, software={"infer": {"float32_matmul": before}})
    finally:
        torch.set_float32_matmul_precision(before)


@script()
def settings_changed_after_the_first_step() -> Pair:
    before = torch.get_float32_matmul_precision()

    def run(model: Any) -> Any:
        first = step(model)
        torch.set_float32_matmul_precision("medium")
        return first, step(model)

    try:
        return refused_only(run, software={"infer": {"float32_matmul": before}})
    finally:
        torch.set_float32_matmul_precision(before)


@script()
def another_device_in_the_profile() -> Pair:
    elsewhere = plan()
    group = attrs.evolve(elsewhere.groups[0], device=DeviceType("T4", DeviceKind.CUDA))
    apply_(Two(), attrs.evolve(elsewhere, groups=(group,)))
    return 0, "a refusal"


@script()
def another_width() -> Pair:
    return refused_only(
        lambda model: model(torch.randn(4, 32)), lambda: Two(width=32), weight_shapes={"a": (16, 16), "b": (16, 16)}
    )


@script()
def another_depth() -> Pair:
    return refused_only(step, variants={**BOTH, "c": INT8})


@script()
def more_layers_than_planned() -> Pair:
    def make() -> Any:
        model = Two(lambda model, x: model.c(model.body(x)))
        model.c = nn.Linear(WIDTH, WIDTH)
        return model

    return refused_only(step, make)


@script()
def another_vocabulary() -> Pair:
    def make() -> Any:
        model = Two()
        model.b = nn.Linear(WIDTH, 40)
        return model

    return refused_only(step, make, weight_shapes={"a": (16, 16), "b": (50, 16)})


@script()
def another_model() -> Pair:
    return refused_only(lambda model: model(batch()), lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4)))


@script()
def plan_of_the_inner_module() -> Pair:
    return refused_only(lambda model: model(batch()), lambda: nn.ModuleDict({"net": Two()}))


@script()
def plan_of_the_outer_module() -> Pair:
    return refused_only(step, variants={"net.a": INT8, "net.b": BFLOAT16})


@script()
def linear_became_a_convolution() -> Pair:
    def make() -> Any:
        model = Two(lambda model, x: model.b(model.a(x.view(4, WIDTH, 1, 1)).flatten(1)))
        model.a = nn.Conv2d(WIDTH, WIDTH, 1)
        return model

    return refused_only(step, make, weight_shapes={"a": (16, 16), "b": (16, 16)})


@script()
def half_model() -> Pair:
    return refused_only(lambda model: model(batch().half()), lambda: Two().half())


@script()
def double_model() -> Pair:
    return refused_only(lambda model: model(batch().double()), lambda: Two().double())


@script()
def bfloat16_after_apply() -> Pair:
    return refused_only(lambda model: model.bfloat16()(batch().bfloat16()))


@script()
def double_after_apply() -> Pair:
    return refused_only(lambda model: model.double()(batch().double()))


@script()
def double_inputs() -> Pair:
    return refused_only(lambda model: model(batch().double()))


@script()
def a_group_that_the_plan_lacks() -> Pair:
    apply_(Two(), plan(), group="elsewhere")
    return 0, "a refusal"


@script()
def a_backend_that_is_not_there() -> Pair:
    apply_(Two(), plan(), backend="nowhere")
    return 0, "a refusal"


@script()
def no_plan_at_all() -> Pair:
    apply_(Two(), None)  # type: ignore[arg-type]
    return 0, "a refusal"


@script()
def a_variant_that_does_not_exist() -> Pair:
    apply_(Two(), {"a#0": "int3"})
    return 0, "a refusal"


@script()
def infinite_activations() -> Pair:
    return refused_only(lambda model: model(torch.full((4, WIDTH), float("inf"))))


# Copies, saved models, processes, threads


def copied(how: Callable[[Any], Any]) -> Pair:
    """A copy is a plain model, takes a plan of its own, and the original keeps its."""
    model = Two()
    apply_(model, plan())
    other = how(model)
    as_copied = step(other)
    apply_(other, plan())
    under, _ = same()
    return [as_copied, step(other), step(model)], [plain(step), under, same()[1]]


def saved(model: Any) -> Any:
    """Through ``torch.save`` of the whole model."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@script()
def pickled() -> Pair:
    return copied(lambda model: pickle.loads(pickle.dumps(model)))


@script()
def deepcopied() -> Pair:
    return copied(copy.deepcopy)


@script()
def shallow_copied() -> Pair:
    model = Two()
    apply_(model, plan())
    other = copy.copy(model)
    return step(other), same()[1]


@script()
def saved_and_loaded() -> Pair:
    return copied(saved)


@script()
def state_dict_round_trip() -> Pair:
    model, other = Two(), Two()
    apply_(model, plan())
    with torch.no_grad():
        model.a.weight.mul_(2)
    other.load_state_dict(model.state_dict())

    def doubled() -> Any:
        twin = Two()
        with torch.no_grad():
            twin.a.weight.mul_(2)
        return twin

    return [step(other), step(model)], [plain(step, doubled), same(make=doubled)[1]]


def _in_process(model: Any, queue: Any) -> None:
    queue.put([None if t is None else t.numpy() for t in step(model)])


@script()
def spawned() -> Pair:
    model = Two()
    apply_(model, plan())
    process = multiprocessing.get_context("spawn").Process(target=_in_process, args=(model, None))
    process.start()
    return 0, "a refusal"


@script()
def forked() -> Pair:
    model = Two()
    apply_(model, plan())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(write, "wb") as stream:
                stream.write(pickle.dumps([t.tolist() for t in step(model)]))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        found = pickle.loads(stream.read())
    os.waitpid(child, 0)
    return [torch.tensor(t) for t in found], same()[1]


@script(RuntimeError)
def two_threads() -> Pair:
    model = Two(lambda model, x: (barrier.wait(5), model.body(x))[1])
    barrier = threading.Barrier(2)
    apply_(model, plan())
    found: list[Any] = [None, None]

    def run(i: int) -> None:
        try:
            found[i] = model(batch(i)).detach()
        except BaseException as error:
            found[i] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [e for e in found if isinstance(e, QSyncError)]
    if errors:
        raise errors[0]
    twin = Two()
    with Reference(twin, BOTH).running():
        return found, [twin(batch(i)).float().detach() for i in range(2)]


@script()
def threads_in_turn() -> Pair:
    def run(model: Any) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(step(model)))
        thread.start()
        thread.join()
        return found

    model = Two()
    apply_(model, plan())
    return run(model), same()[1]


# Wrappers and compilers


@script()
def ddp_before_apply() -> Pair:
    with one_rank():
        return refused_only(step, lambda: nn.parallel.DistributedDataParallel(Two()))


@script()
def ddp_after_apply() -> Pair:
    model = Two()
    with one_rank():
        apply_(model, plan(), group="infer")
        return step(nn.parallel.DistributedDataParallel(model)), same()[1]


@contextlib.contextmanager
def one_rank() -> Any:
    """A process group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


@script()
def data_parallel_before_apply() -> Pair:
    return refused_only(step, lambda: nn.DataParallel(Two()))


@script()
def compiled_before_apply() -> Pair:
    return refused_only(step, lambda: torch.compile(Two(), backend="eager"))


@script()
def compiled_after_apply() -> Pair:
    model = Two()
    apply_(model, plan())
    return step(torch.compile(model, backend="eager")), same()[1]


@script()
def compiled_in_place_before_apply() -> Pair:
    def make() -> Any:
        model = Two()
        model.compile(backend="eager")
        return model

    model = make()
    apply_(model, plan())
    return step(model), same()[1]


@script()
def compiled_part() -> Pair:
    model = Two()
    apply_(model, plan())
    model.a.compile(backend="eager")
    return step(model), same()[1]


@script()
def scripted_model() -> Pair:
    return refused_only(step, lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH))), variants={"0": INT8})


# Patched and called in other ways


@script()
def forward_patched_before() -> Pair:
    def make() -> Any:
        model = Two()
        own = model.b.forward
        model.b.forward = lambda input: 2 * own(input)
        return model

    return same(make=make)


@script()
def forward_patched_with_a_function() -> Pair:
    def make() -> Any:
        model = Two()
        model.b.forward = lambda input: 2 * F.linear(input, model.b.weight, model.b.bias)
        return model

    return same(make=make)


@script()
def forward_patched_after() -> Pair:
    def run(model: Any) -> Any:
        own = model.b.forward
        model.b.forward = lambda input: 2 * own(input)
        return step(model)

    return same(run)


@script()
def forward_of_the_class_patched_after() -> Pair:
    class Own(Two):
        pass

    def run(model: Any) -> Any:
        Own.body = lambda self, x: 2 * self.b(self.a(x).relu())  # type: ignore[method-assign]
        return step(model)

    return same(run, Own)


@script()
def removed_in_the_wrong_order() -> Pair:
    model = Two()
    applied = apply_(model, plan())
    own = model.b.forward
    model.b.forward = lambda input: own(input)
    applied.remove()
    return 0, "a refusal"


@script()
def two_plans() -> Pair:
    model = Two()
    apply_(model, plan())
    apply_(model, plan(BASE))
    return 0, "a refusal"


@script()
def one_plan_after_another() -> Pair:
    model = Two()
    apply_(model, plan({"a": BFLOAT16, "b": INT8})).remove()
    apply_(model, plan())
    return step(model), same()[1]


@script()
def removed_twice() -> Pair:
    model = Two()
    applied = apply_(model, plan())
    applied.remove()
    applied.remove()
    return step(model), plain(step)


@script()
def removed_between_forward_and_backward() -> Pair:
    model = Two()
    applied = apply_(model, plan())
    y = model(batch())
    applied.remove()
    y.square().sum().backward()
    return [y.detach(), *gradients(model)], same()[1]


@script()
def submodule_replaced_after_apply() -> Pair:
    def run(model: Any) -> Any:
        model.a = nn.Linear(WIDTH, WIDTH)
        return step(model)

    model = Two()
    apply_(model, plan())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(model)
    named = any("a#0" in str(one.message) and "did not run" in str(one.message) for one in said)
    return torch.tensor(named), torch.tensor(True)


@script()
def parametrization_after_apply() -> Pair:
    def run(model: Any) -> Any:
        nn.utils.parametrizations.weight_norm(model.b)
        return step(model)

    model, twin = Two(), Two()
    apply_(model, plan())
    found = run(model)
    nn.utils.parametrizations.weight_norm(twin.b)
    with Reference(twin, BOTH).running():
        return found, step(twin)


@script()
def weight_norm_before_apply() -> Pair:
    def make() -> Any:
        model = Two()
        nn.utils.parametrizations.weight_norm(model.b)
        return model

    return same(make=make)


@script()
def forward_called_by_name() -> Pair:
    return same(make=lambda: Two(lambda model, x: model.b.forward(model.a.forward(x).relu())))


@script()
def functional_calls_in_another_order() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, model.b.weight) + F.linear(x, model.a.weight, model.a.bias) + F.linear(x, model.b.weight)

    return same(make=lambda: Two(body))


@script()
def weights_cast_to_the_format_of_the_activation() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.a(x).relu()
        return F.linear(x, model.b.weight.to(x.dtype), model.b.bias.to(x.dtype))

    variants = {"a": BFLOAT16, "b": INT8}
    model, twin = Two(body), Two()
    apply_(model, plan(variants))
    with Reference(twin, variants).running():
        return step(model), step(twin)


@script()
def parts_called_by_themselves() -> Pair:
    return same(lambda model: (model.b(model.a(batch()).relu()).float().square().sum().backward(), gradients(model))[1])


@script()
def a_weight_seen_as_a_view() -> Pair:
    model = Two(lambda model, x: F.linear(F.linear(x, model.a.weight[:, :]), model.b.weight.view(WIDTH, WIDTH)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apply_(model, plan())
        found = step(model)
    if not any("did not run" in str(one.message) for one in said):
        return found, "a warning that names the operators"
    return found, plain(step, lambda: Two(model.way))


@script()
def weights_tied_after_apply() -> Pair:
    def run(model: Any) -> Any:
        model.b.weight = model.a.weight
        return step(model)

    model = Two()
    apply_(model, plan())
    found = run(model)
    twin = Two(lambda model, x: model.b(model.a(x).relu()))
    # Each module keeps its own format, although they read one weight.
    clone = nn.Parameter(twin.a.weight.detach().clone())
    twin.b.weight = clone
    with Reference(twin, BOTH).running():
        expected = step(twin)
    y, a, a_bias, b, b_bias = expected
    return found, [y, a + b, a_bias, b_bias]


@script()
def tied_weights_with_two_formats() -> Pair:
    def make() -> Any:
        model = Two()
        model.b.weight = model.a.weight
        return model

    model = make()
    apply_(model, plan())
    twin = Two()
    with torch.no_grad():
        twin.b.weight.copy_(twin.a.weight)
    with Reference(twin, BOTH).running():
        y, a, a_bias, b, b_bias = step(twin)
    return step(model), [y, a + b, a_bias, b_bias]


@script()
def a_model_that_calls_itself() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return model.body(x)
        return torch.cat([model(x[:1]), model(x[1:])])

    def flat(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([model.body(row[None]) for row in x])

    model, twin = Two(body), Two(flat)
    apply_(model, plan())
    with Reference(twin, BOTH).running():
        expected = step(twin)
    return step(model), expected


# Autograd in unusual ways


def twice(model: Any) -> Any:
    """Two forwards, one backward."""
    (model(batch(1)).float().square().sum() + model(batch(2)).float().square().sum()).backward()
    return gradients(model)


@script()
def two_forwards_one_backward() -> Pair:
    return same(twice)


@script()
def two_forwards_of_a_checkpointed_model() -> Pair:
    model = Two(lambda model, x: checkpoint(model.body, x, use_reentrant=False))
    apply_(model, plan())
    return twice(model), same(twice)[1]


@script()
def checkpointed_reentrant() -> Pair:
    model = Two(lambda model, x: checkpoint(model.body, x, use_reentrant=True))
    apply_(model, plan())
    x = batch().requires_grad_()
    return step(model, x), same()[1]


@script()
def checkpointed_closure_with_functional_calls() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        part = lambda t: F.linear(F.linear(t, model.a.weight, model.a.bias).relu(), model.b.weight, model.b.bias)  # noqa: E731
        return checkpoint(part, x, use_reentrant=True)

    model = Two(body)
    apply_(model, plan())
    return step(model, batch().requires_grad_()), same()[1]


@script()
def checkpointed_from_outside() -> Pair:
    model = Two()
    apply_(model, plan())
    checkpoint(model, batch(), use_reentrant=False).square().sum().backward()
    return gradients(model), same()[1][1:]


@script()
def checkpointed_sequential() -> Pair:
    from torch.utils.checkpoint import checkpoint_sequential

    body = lambda model, x: checkpoint_sequential([model.a, nn.ReLU(), model.b], 2, x, use_reentrant=False)  # noqa: E731
    model = Two(body)
    apply_(model, plan())
    return step(model), same()[1]


class OwnCheckpoint(torch.autograd.Function):
    """Checkpointing of one's own make, as in guided-diffusion."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, length: int, *args: Any) -> Any:
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run_function(*[x.view_as(x) for x in inputs])
        return (None, None, *torch.autograd.grad(output, inputs + ctx.parameters, output_grads, allow_unused=True))


def own_checkpoint(function: Any, x: torch.Tensor, parameters: Any) -> Any:
    """A function of one tensor, checkpointed."""
    return OwnCheckpoint.apply(function, 1, x, *parameters)


def with_functions(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The body, by functional calls."""
    return F.linear(F.linear(x, model.a.weight, model.a.bias).relu(), model.b.weight, model.b.bias)


def checkpointed_by(how: Any, run: Any, variants: Mapping[str, Variant] = BOTH) -> Pair:
    """A body in a checkpoint, and as it is; what is not nearest is compared with the same plan without checkpoints."""
    model = Two(lambda model, x: how(lambda t: with_functions(model, t), x, list(model.parameters())))
    apply_(model, plan(variants), seed=3)
    found = run(model)
    if all(variant.rounding is Rounding.NEAREST or variant.compute is not Precision.INT8 for variant in variants.values()):
        return found, same(run)[1]
    twin = Two()
    apply_(twin, plan(variants), seed=3)
    return found, run(twin)


@script()
def own_checkpoint_of_functional_calls() -> Pair:
    return checkpointed_by(own_checkpoint, step)


@script()
def own_checkpoint_in_an_own_checkpoint() -> Pair:
    return checkpointed_by(lambda f, x, ps: own_checkpoint(lambda t: own_checkpoint(f, t, ps), x, ps), step)


@script()
def own_checkpoint_by_saved_tensors_hooks() -> Pair:
    def how(function: Any, x: torch.Tensor, _: Any) -> Any:
        count, kept = iter(range(99)), []

        def unpack(index: int) -> Any:
            if not kept:
                keep = lambda t: (kept.append(t.detach()), t)[1]  # noqa: E731
                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                    function(x)
            return kept[index]

        with torch.autograd.graph.saved_tensors_hooks(lambda _: next(count), unpack):
            return function(x)

    return checkpointed_by(how, step)


@script()
def own_checkpoint_and_two_forwards_of_stochastic_rounding() -> Pair:
    return checkpointed_by(own_checkpoint, twice, {"a": Variant.parse("int8"), "b": Variant.parse("int8")})


@script()
def own_checkpoint_of_a_part_from_outside() -> Pair:
    def run(model: Any) -> Any:
        y = own_checkpoint(model.a, batch().requires_grad_(), list(model.a.parameters())).float()
        model.b(y.relu()).float().square().sum().backward()
        return gradients(model)

    return same(run)


@script()
def own_checkpoint_under_ddp() -> Pair:
    model = Two(lambda model, x: own_checkpoint(lambda t: with_functions(model, t), x, list(model.parameters())))
    with one_rank():
        apply_(model, plan(), group="infer")
        return step(nn.parallel.DistributedDataParallel(model)), same()[1]


@script()
def checkpoint_that_is_given_its_weights() -> Pair:
    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        part = lambda t, *ps: F.linear(F.linear(t, ps[0], ps[1]).relu(), ps[2], ps[3])  # noqa: E731
        return checkpoint(part, x, *model.parameters(), use_reentrant=True)

    model = Two(body)
    apply_(model, plan())
    return step(model), same()[1]


@script()
def own_function_with_gradients_written_down() -> Pair:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    model, twin = Two(lambda model, x: Own.apply(x, model.a.weight)), Two()
    apply_(model, plan({"a": INT8, "b": FLOAT32}))
    x = batch().requires_grad_()
    y = model(x)
    y.backward(batch(2))
    return [x.grad, model.a.weight.grad], [batch(2) @ twin.a.weight.detach(), batch(2).t() @ batch()]


@script()
def training_step_that_calls_functions() -> Pair:
    run = lambda model: (model.b(F.linear(batch(), model.a.weight)).float().square().sum().backward(), gradients(model))  # noqa: E731
    return refused_only(run)


@script()
def training_step_that_calls_functions_only() -> Pair:
    return refused_only(lambda model: (with_functions(model, batch()).square().sum().backward(), gradients(model)))


@script()
def training_step_under_autocast() -> Pair:
    def run(model: Any) -> Any:
        y = model.a(batch()).relu()
        F.linear(y, model.b.weight).float().square().sum().backward()
        return gradients(model)

    return refused_only(
        inside(autocast, run), variants={**AMP, "b": attrs.evolve(INT8, output=Precision.BFLOAT16)}, base=Precision.BFLOAT16
    )


@script()
def functional_call_beside_the_model() -> Pair:
    model = Two()
    apply_(model, plan())
    loss = model(batch()).square().sum() + F.linear(batch(2), model.a.weight).square().sum()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss.backward()
    named = any("gradient of a comes from a product in full precision too" in str(one.message) for one in said)
    return torch.tensor(named), torch.tensor(True)


@script()
def compiled_functional_calls_in_a_checkpoint() -> Pair:
    model = Two(lambda model, x: checkpoint(lambda t: with_functions(model, t), x, use_reentrant=False) + model.a(x))
    apply_(model, plan())
    found = step(torch.compile(model, backend="aot_eager"))
    return found, same(make=lambda: Two(lambda model, x: with_functions(model, x) + model.a(x)))[1]


@script()
def checkpoint_around_a_compiled_model() -> Pair:
    def run(checkpointed: bool) -> list[Any]:
        model = Two()
        apply_(model, plan({"a": Variant.parse("int8>float32"), "b": Variant.parse("int8>float32")}), seed=3)
        compiled = torch.compile(model, backend="aot_eager")
        called = (lambda x: checkpoint(compiled, x, use_reentrant=False)) if checkpointed else compiled
        outputs = [called(batch(number)) for number in range(2)]
        sum(output.square().sum() for output in outputs).backward()
        return gradients(model)

    return run(True), run(False)


@script()
def class_exchanged_after_apply() -> Pair:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def run(model: Any) -> Any:
        model.a.__class__ = Doubled
        return step(model)

    return refused_only(run)


@script()
def penalty_on_all_weights() -> Pair:
    def run(model: Any) -> Any:
        penalty = sum(p.square().sum() for p in model.parameters())
        (model.a(batch()).float().square().sum() + penalty).backward()  # b has no call here
        return gradients(model), step(model)

    return same(run)


@script()
def part_outside_of_autocast() -> Pair:
    run = lambda model: (model.b(model.a(batch()).relu()).square().sum().backward(), gradients(model))  # noqa: E731
    return refused_only(run, variants=AMP, base=Precision.BFLOAT16)


@script()
def functional_call_outside_of_autocast() -> Pair:
    run = lambda model: (with_functions(model, batch()).square().sum().backward(), gradients(model))  # noqa: E731
    return refused_only(run, variants=AMP, base=Precision.BFLOAT16)


@script()
def part_under_its_autocast() -> Pair:
    run = inside(autocast, lambda m: (m.b(m.a(batch()).relu()).float().square().sum().backward(), gradients(m))[1])
    model = Two()
    apply_(model, plan(AMP, Precision.BFLOAT16))
    return run(model), plain(run)


@script()
def backward_twice() -> Pair:
    def run(model: Any) -> Any:
        loss = model(batch()).float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    return same(run)


@script(RuntimeError)
def backward_twice_without_the_graph() -> Pair:
    def run(model: Any) -> Any:
        loss = model(batch()).square().sum()
        loss.backward()
        loss.backward()

    return refused_only(run)


@script()
def second_derivatives() -> Pair:
    def run(model: Any) -> Any:
        loss = model(batch()).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    return refused_only(run, variants={"a": INT8, "b": INT8})


@script()
def gradient_of_the_input() -> Pair:
    def run(model: Any) -> Any:
        x = batch().requires_grad_()
        return torch.autograd.grad(model(x).float().square().sum(), x)[0]

    return same(run)


@script(RuntimeError)
def per_sample_gradients() -> Pair:
    def run(model: Any) -> Any:
        params = dict(model.named_parameters())
        loss = lambda p, x: torch.func.functional_call(model, p, (x[None],)).float().square().sum()  # noqa: E731
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, batch())
        return list(found.values())

    model, twin = Two(), Two()
    apply_(model, plan())
    found = run(model)
    rows = []
    with Reference(twin, BOTH).running():
        for row in batch():
            rows.append(step(twin, row[None])[1:])
    return found, [torch.stack(parts) for parts in zip(*rows, strict=True)]


@script(RuntimeError, NotImplementedError)
def forward_mode() -> Pair:
    def run(model: Any) -> Any:
        return torch.func.jvp(lambda x: model(x), (batch(),), (torch.ones(4, WIDTH),))

    return refused_only(run, variants={"a": INT8, "b": INT8})


@script()
def functional_call_with_other_weights() -> Pair:
    def run(model: Any) -> Any:
        other = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        y = torch.func.functional_call(model, other, (batch(),)).float()
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(other.values()))]

    def make() -> Any:
        twin = Two()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        return twin

    model = Two()
    apply_(model, plan())
    return run(model), same(make=make)[1]


@script()
def no_grad_in_training_mode() -> Pair:
    return same(inside(torch.no_grad, lambda model: model(batch()).float()))


@script()
def inference_mode_in_training_mode() -> Pair:
    run = lambda model: model(batch()).float()  # noqa: E731
    model = Two()
    apply_(model, plan())
    with torch.inference_mode():
        found = run(model)
    return [found.clone(), step(model)], [same(inside(torch.no_grad, run))[1], same()[1]]


@script()
def eval_then_train() -> Pair:
    model = Two()
    apply_(model, plan())
    evaluated = step(model.eval())
    return [evaluated, step(model.train())], [plain(step), same()[1]]


@script()
def part_in_eval_mode() -> Pair:
    return same(lambda model: (model.b.eval(), step(model))[1])


@script()
def lower_eval() -> Pair:
    return same(lambda model: step(model.eval()), lower_eval=True)


@script()
def accumulated_and_clipped_gradients() -> Pair:
    def run(model: Any) -> Any:
        for seed in range(3):
            (model(batch(seed)).float().square().sum() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return gradients(model)

    return same(run)


@script()
def frozen_weight() -> Pair:
    return same(lambda model: (model.a.requires_grad_(False), step(model))[1])


@script()
def frozen_and_unfrozen() -> Pair:
    return same(lambda model: (model.b.requires_grad_(False), step(model), model.b.requires_grad_(True), step(model))[3])


@script()
def hooks_that_change_inputs_outputs_and_gradients() -> Pair:
    def run(model: Any) -> Any:
        model.a.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model.a.register_forward_hook(lambda m, args, y: y - 1)
        model.b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        model.a.weight.register_hook(lambda g: g * 3)
        return step(model)

    return same(run)


# Outputs


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


# Errors, then on


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
        return [outside, F.linear(batch(), model.a.weight.detach()).float()]

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
    found = [step(model), F.linear(batch(), model.a.weight.detach())]
    with Reference(twin, BOTH).running():
        expected = step(twin)
    return found, [expected, F.linear(batch(), twin.a.weight.detach())]


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


# Parameters and optimizers


@script()
def loaded_with_assign() -> Pair:
    return same(
        lambda model: (model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True), step(model))[1]
    )


@script()
def parameters_replaced() -> Pair:
    def run(model: Any) -> Any:
        model.a.weight = nn.Parameter(model.a.weight.detach() * 2)
        model.b.weight.data = model.b.weight.data * 3
        return step(model)

    return same(run)


@script()
def optimizer_that_replaces_parameters() -> Pair:
    def run(model: Any) -> Any:
        step(model)
        for module in (model.a, model.b):
            module.weight = nn.Parameter((module.weight - 0.01 * module.weight.grad).detach())
        return step(model)

    return same(run)


@script()
def meta_device() -> Pair:
    with torch.device("meta"):
        model = Two()
    apply_(model, plan())
    model.to_empty(device="cpu")
    model.load_state_dict(Two().state_dict())
    return step(model), same()[1]


@script(RuntimeError, NotImplementedError)
def run_on_the_meta_device() -> Pair:
    with torch.device("meta"):
        model = Two()
    apply_(model, plan())
    y = model(batch().to("meta"))
    return torch.tensor(y.device.type == "meta"), torch.tensor(True)


@script()
def trained_with_adam_and_momentum() -> Pair:
    def run(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            step(model)
            optimizer.step()
        return step(model)

    return same(run)


@script()
def average_of_weights() -> Pair:
    def run(model: Any) -> Any:
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        return [average(batch()).float().detach(), step(model)]

    model = Two()
    apply_(model, plan())
    return run(model), [plain(lambda m: m(batch()).detach()), same()[1]]


@script()
def convolution_without_a_batch() -> Pair:
    run = lambda model: (model(torch.ones(3, 8, 8) * torch.arange(8)).float().square().sum().backward(), gradients(model))[1]  # noqa: E731
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 2, padding="same")))[1]  # noqa: E731
    return same(run, make, {"0": INT8, "1": BFLOAT16})


# Two ranks


RANK = """
import sys, torch, torch.distributed as dist
from robustness.wrong_scripts import *
from qsync_core.errors import QSyncError
dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
model = Two()
try:
    if what == "rank without a plan" and rank == 1:
        pass
    elif what == "another plan":
        apply_(model, plan() if rank == 0 else plan({"a": BFLOAT16, "b": INT8}), group="infer")
    elif what == "another width":
        apply_(model if rank == 0 else Two(width=8), plan(weight_shapes={"a": (16, 16), "b": (16, 16)}), group="infer")
    elif what == "wrong group":
        apply_(model, plan(), group="infer" if rank == 0 else "elsewhere")
    else:
        apply_(model, plan(), group="infer")
    run = nn.parallel.DistributedDataParallel(model) if what == "right" else model
    if what == "a training step of functions":
        step = lambda m, x: with_functions(m, x).square().sum().backward()
    context = autocast if what == "autocast on one rank" and rank == 0 else contextlib.nullcontext
    found = inside(context, lambda m: step(m, batch(rank)))(run)
    if what == "right":
        def mean():
            grads = []
            for seed in range(2):
                twin = Two()
                with Reference(twin, BOTH).running():
                    grads.append(step(twin, batch(seed))[1:])
            return found[1:], [(a + b) / 2 for a, b in zip(*grads)]
        compare_with_either(mean)
    print("right" if what == "right" or what == "rank without a plan" and rank == 1 else "silent", flush=True)
except QSyncError as error:
    print("refused", str(error).replace("\\n", "|"), flush=True)
import os
os._exit(0)
"""


def ranks(what: str) -> Pair:
    """Two gloo processes; each is right or says one sentence."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "QSYNC_RANK_TIMEOUT_S": "6",
              "PYTHONPATH": path}  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, what], env={**common, "RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in processes]
    lines = [out.strip().split("\n")[-1] for out, _ in said]
    if any(not line.startswith(("right", "refused")) or "|" in line for line in lines):
        raise AssertionError(f"{lines} {[err[-800:] for _, err in said]}")
    return torch.tensor([line == "right" for line in lines]).float(), torch.tensor(
        [what == "right", what in ("right", "rank without a plan")]
    ).float()


for _what in (
    "right",
    "rank without a plan",
    "another plan",
    "another width",
    "wrong group",
    "autocast on one rank",
    "a training step of functions",
):
    SCRIPTS[f"two_ranks_{_what.replace(' ', '_')}"] = ((lambda what: lambda: ranks(what))(_what), ())


# Judging


@attrs.frozen
class Outcome:
    """What became of a script: ``right``, ``refused``, ``silent`` or ``failed``."""

    name: str
    status: str
    detail: str = ""


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


def run(name: str) -> Outcome:
    """One script."""
    torch.set_num_threads(1)
    function, refusals = SCRIPTS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compare_with_either(function)
    except Silent as error:
        return Outcome(name, "silent", str(error))
    except QSyncError as error:
        return Outcome(name, "failed" if "\n" in str(error) else "refused", str(error))
    except refusals as error:
        return Outcome(name, "refused", f"by PyTorch: {str(error).splitlines()[0]}")
    except BaseException:
        return Outcome(name, "failed", traceback.format_exc()[-2000:])
    return Outcome(name, "right")


def rows_of(found: list[Outcome]) -> list[dict[str, Any]]:
    """The row T2."""
    count = Counter(outcome.status for outcome in found)
    spread = f"{len(found)} scripts: {count['refused']} refused in a sentence, {count['right']} right, {count['failed']} failed"
    what = "wrong and unusual scripts: other numbers than an independent reference, without a word"
    return [{"id": "T2", "what": what, "value": count["silent"], "unit": "scripts", "spread": spread, "target": "0"}]


def main() -> None:
    """Run, print, and write the row T2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scripts, comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or list(SCRIPTS)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:  # whose workers may start processes
        found = list(pool.map(run, names))
    for outcome in found:
        print(json.dumps(attrs.asdict(outcome)), file=sys.stderr, flush=True)
    rows = rows_of(found)
    print(json.dumps(rows, indent=2))
    if not options.no_write and not options.only:
        write_rows("robustness", rows, "python tests/benchmarks/robustness/wrong_scripts.py")
    if any(outcome.status in ("silent", "failed") for outcome in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
