"""Edges of random programs: what really changes when a layer's output changes is what the graph says depends on it."""

from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn

from hypothesis_profiles import tries
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

SIZE = 4
Step = tuple[str, int, int]
"""Operation and the positions of its operands, counted back from the newest value."""

WHOLE = ("linear", "add", "tanh", "add_", "tanh_", "swap halves", "fold", "stack", "keep")
PARTIAL = ("write half",)


class Program(nn.Module):
    """Runs a list of steps over a growing list of values, each batch × SIZE; the result is the newest plus all the kept ones."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for operation, *_ in steps if operation == "linear")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, kept, layers = [x + 0], [], iter(self.layers)
        for operation, i, j in self.steps:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(self.run(operation, a, b, layers, kept))
        return sum(kept, start=values[-1]).tanh()

    def run(self, operation: str, a: torch.Tensor, b: torch.Tensor, layers, kept: list[torch.Tensor]) -> torch.Tensor:
        match operation:
            case "linear":
                return next(layers)(a)
            case "add":
                return a + 0.5 * b
            case "tanh":
                return a.tanh()
            case "add_":
                return (a * 1).add_(b)
            case "tanh_":
                return (a * 1).tanh_()
            case "swap halves":
                left, right = a.chunk(2, dim=-1)
                return torch.cat([right, left], dim=-1)
            case "fold":
                return a.reshape(-1, 2, 2).transpose(1, 2).reshape(-1, SIZE).contiguous()
            case "stack":
                return torch.stack([a, b]).unbind(0)[1]
            case "keep":
                kept.append(a)
                return b.clone()
            case "write half":
                c = a * 1
                c[:, :2].add_(b[:, 2:])
                return c
        raise AssertionError(operation)


def influence(model: Program, x: torch.Tensor) -> set[tuple[int, int]]:
    """Pairs (i, k) of layers: changing the output of layer i changes the input of layer k, or the result (k = −1)."""

    def run(changed: int | None) -> list[torch.Tensor]:
        inputs: list[torch.Tensor] = []
        handles = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone())) for layer in model.layers]
        if changed is not None:
            noise = torch.randn(x.shape[0], SIZE, generator=torch.Generator().manual_seed(1)) * 0.1
            handles.append(model.layers[changed].register_forward_hook(lambda _, __, output: output + noise))
        with torch.no_grad():
            result = model(x)
        for handle in handles:
            handle.remove()
        return [*inputs, result]

    plain, count = run(None), len(model.layers)
    pairs = set()
    for i in range(count):
        for k, (before, after) in enumerate(zip(plain, run(i), strict=True)):
            if not torch.equal(before, after):
                pairs.add((i, k if k < count else -1))
    return pairs


def reach(dag: PrecisionDag, count: int) -> set[tuple[int, int]]:
    """The same pairs from the graph's edges."""
    sources: dict[OpId, set[int]] = {}
    pairs = set()
    for operator in dag.operators:
        arriving = set().union(*(sources[source] for source in operator.inputs))
        name = operator.op_id.fqn
        own = {int(name.removeprefix("layers."))} if operator.is_adjustable else set()
        pairs.update((i, k) for i in arriving for k in own)
        sources[operator.op_id] = arriving | own
    pairs.update((i, -1) for i in sources[dag.operators[-1].op_id])
    return {pair for pair in pairs if pair[0] < count}


def check(steps: list[Step], *, exact: bool) -> None:
    torch.manual_seed(0)
    steps = [("linear", 0, 0), *steps, ("linear", 0, 0)]
    model = Program(steps)
    x = torch.randn(3, SIZE)
    dag = trace(
        Job(
            "program",
            model,
            lambda step, size: Batch((x,)),
            lambda output, batch: output.square().mean(),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            3,
        )
    )
    assert sorted(int(o.op_id.fqn.removeprefix("layers.")) for o in dag.adjustable) == list(range(len(model.layers)))
    real, stated = influence(model, x), reach(dag, len(model.layers))
    assert real <= stated
    if exact:
        assert stated <= real


def steps_of(operations: Sequence[str]) -> st.SearchStrategy[list[Step]]:
    position = st.integers(0, 3)
    return st.lists(st.tuples(st.sampled_from(operations), position, position), min_size=1, max_size=8)


slow_machine = tries(15, suppress_health_check=[HealthCheck.too_slow])


@slow_machine
@given(steps_of([operation for operation in WHOLE if operation != "stack"]))
def test_edges_are_exactly_what_influences(steps: list[Step]) -> None:
    check(steps, exact=True)


@slow_machine
@given(steps_of(WHOLE + PARTIAL))
def test_no_influence_is_missing_through_partial_writes_and_multiple_outputs(steps: list[Step]) -> None:
    check(steps, exact=False)
