"""Products of a row's shapes, tuned before its contenders start, as ``qsync prepare`` tunes a job's."""

from __future__ import annotations

import attrs
import torch
from torch import nn

from eight_bit.steps import ALL, ROWS, Shape, batch_of, job_of, linears_of, made
from kernels.bench import Bench
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import OperatorRequest
from qsync_core.tuning.search import Effort
from qsync_torch.devices import device_facts
from qsync_torch.kernels.installed import open_store
from qsync_torch.kernels.selection import AUTO, find_backends
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.job_tuning import describe, distinct_requests, tune_requests

_EFFORT = Effort(kernels=5)


def requests_of(shape: Shape, device_kind: str, capability: str, *, quick: bool = False) -> list[OperatorRequest]:
    """The products in 8 bit of one layer, which all layers share; not those of the head, which stays in the base."""
    single = attrs.evolve(shape, arguments={**shape.arguments, "num_hidden_layers": 1})
    model = made(single, quick)
    lowered = set(linears_of(model))
    widths = {
        name: {module.in_features, module.out_features} for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    of_layers = set[int]().union(*(widths[name] for name in lowered))
    of_heads = set[int]().union(*widths.values()) - of_layers
    dag = trace(job_of(shape.title, model, [batch_of(single, torch.device("cpu"), quick)]))
    asked = distinct_requests(dag, [Variant.parse(text) for text in (ALL, ROWS)], device_kind, capability)
    return [
        one for one in asked
        if one.request.op.startswith("linear") and of_heads.isdisjoint(size for size_of in one.request.shapes for size in size_of)
    ]  # fmt: skip


def tune(shape: Shape, bench: Bench, seconds: float) -> None:
    """Tune them with every installed backend; records and compiled kernels stay where contenders find them."""
    requests = requests_of(shape, *device_facts(bench.device), quick=bench.quick)
    found = tune_requests(
        requests, find_backends(AUTO), open_store(bench.device, None), bench.device, effort=_EFFORT, seconds=seconds
    )
    for one in found.requests:
        best = (
            "no backend runs it"
            if one.best is None
            else f"{one.best.key.backend}, {one.best.config}: {one.best.latency_ns / 1e3:.1f} µs"
        )
        bench.say(f"{shape.title}, {describe(one.asked)}: {best}")
