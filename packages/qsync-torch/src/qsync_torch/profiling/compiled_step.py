"""Compiled steps: a model compiled as its script compiles it, while it is measured (docs/design/cost-mapper.md#compiled-steps)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import Compiled, Compiler
from qsync_torch.profiling.memory import kept_for_backward

if TYPE_CHECKING:
    from qsync_torch.apply.applied_plan import AppliedPlan
    from qsync_torch.profiling.whole_step import StepRunner


@contextmanager
def compiling(runner: StepRunner, applied: AppliedPlan | None) -> Iterator[None]:
    """Have a runner's model compiled as the script has it, under the plan that is in force; where it does not, as it is.

    The first step is run, which compiles.  Afterwards the compiler forgets all its graphs: it makes no more than a few of one
    function, and keeps their memory.

    Raises:
        Exception: whatever the compiler raises.
    """
    if runner.compiled is None:
        yield
        return
    plain = runner.model
    try:
        runner.model = compiled_model(plain, runner.compiled, applied)
        began = time.monotonic()
        runner.forward(0).backward()
        runner.optimizer.zero_grad(set_to_none=True)
        runner.compile_s += time.monotonic() - began
        yield
    finally:
        runner.model = plain
        torch.compiler.reset()


def compiled_model(model: torch.nn.Module, how: Compiled, applied: AppliedPlan | None) -> torch.nn.Module:
    """A model, under a plan or none, or DistributedDataParallel around it, compiled as a script compiles it."""
    if how.by is Compiler.QSYNC and applied is not None:
        from qsync_torch.compiling.compile import compile as compile_chains

        return compile_chains(model, backend=how.backend)
    return cast(torch.nn.Module, torch.compile(model, backend=how.backend))


def saved_bytes(runner: StepRunner) -> int | None:
    """What autograd keeps of a compiled step's forward; None of an eager one, whose operators are measured for it one by one."""
    if runner.compiled is None:
        return None
    static = itertools.chain(runner.model.parameters(), runner.model.buffers(), runner.batches[0].tensors)
    return kept_for_backward(runner.forward(0), static)


def layer_kinds(dag: PrecisionDag, time_of: Callable[[Operator], int]) -> list[tuple[OpId, ...]]:
    """The adjustable operators by their place in a layer, those that read one tensor together (Q, K and V), the longest first.

    Layers repeat: numbers in names count as equal, where shapes are.
    """
    kinds: dict[frozenset[tuple[object, ...]], list[Operator]] = {}
    for operator in dag.adjustable:
        read = operator.inputs[0]
        together = (reader for reader in dag.adjustable if reader.inputs[:1] == (read,))
        kinds.setdefault(frozenset(map(_place, together)), []).append(operator)
    in_order = sorted(kinds.values(), key=lambda members: -sum(map(time_of, members)))
    return [tuple(operator.op_id for operator in members) for members in in_order]


def _place(operator: Operator) -> tuple[object, ...]:
    name = ".".join("*" if part.isdigit() else part for part in operator.op_id.fqn.split("."))
    return name, operator.weight_shape, operator.output_shape
