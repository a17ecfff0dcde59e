"""``qsync trace``: from a job to its PrecisionDag."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qsync_core.artifacts import files as artifact
from qsync_core.cli.options import FiniteRange, output_option
from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.ir.dag import OpClass
from qsync_core.ir.precision import Precision
from qsync_core.units import format_bytes
from qsync_torch.cli.options import batch_size_option

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.dag import PrecisionDag

_MEANING = {
    OpClass.ADJUSTABLE: "a plan picks the precision",
    OpClass.DEPENDENT: "run in the widest precision of their inputs",
    OpClass.GUARDED: "the same, but compute inside in float32",
    OpClass.FIXED: "stay in float32",
}
_SHOWN = 20
"""Operators that cannot be addressed are listed up to this many; --json lists them all."""


@click.command()
@click.argument("job")
@output_option("graph")
@batch_size_option()
@click.option(
    "--bucket-cap-mb", type=FiniteRange(max=2**30), default=None, help="DistributedDataParallel's bucket_cap_mb.  [its default]"
)
@json_option
def trace(job: str, output: Path, batch_size: int | None, bucket_cap_mb: float | None, json_flag: bool) -> None:
    """Trace one training step of JOB: its operators, which of them a plan can lower, and its gradient buckets.

    JOB is a named model (resnet50, bert-base:seq=384) or file.py:function.
    """
    from qsync_torch.load_job import job_code, load_job
    from qsync_torch.tracing.trace import trace as run_trace

    with job_code(job):
        dag = run_trace(load_job(job, batch_size), bucket_cap_mb=bucket_cap_mb)
    artifact.save(dag, output)
    emit(json_flag, _facts(dag, output), lambda console: _render(dag, output, console))


def _facts(dag: PrecisionDag, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "digest": artifact.digest(dag),
        "model": dag.model,
        "batch_size": dag.batch_size,
        "operators": len(dag.operators),
        "classes": {str(op_class): dict(kinds) for op_class, kinds in _kinds_by_class(dag).items()},
        "adjustable": [str(operator.op_id) for operator in dag.adjustable],
        "not_applicable": {str(operator.op_id): operator.not_applicable for operator in dag.operators if operator.not_applicable},
        "parameters": sum(parameter.numel for parameter in dag.parameters),
        "buckets": [{"nbytes": bucket.nbytes, "parameters": list(bucket.parameters)} for bucket in dag.buckets],
        "base": str(dag.base),
        "loss": dag.loss,
        "loss_reduction": dag.loss_reduction,
        "flops": sum(operator.flops for operator in dag.operators),
    }


def _kinds_by_class(dag: PrecisionDag) -> dict[OpClass, Counter[str]]:
    counts: dict[OpClass, Counter[str]] = {op_class: Counter() for op_class in OpClass}
    for operator in dag.operators:
        counts[operator.op_class][operator.kind] += 1
    return counts


def _render(dag: PrecisionDag, output: Path, console: Console) -> None:
    trainable = sum(parameter.numel for parameter in dag.parameters if parameter.requires_grad)
    console.print(
        f"{dag.model}: {len(dag.operators)} operators, {trainable:,} trainable parameters, batch size {dag.batch_size}, "
        f"loss {dag.loss} ({dag.loss_reduction})"
    )
    if dag.base is not Precision.FLOAT32:
        how = "trains under autocast" if dag.autocast else "holds its weights"
        casts = ", which casts what no plan lowers, in place of the rules below" if dag.autocast else ""
        console.print(f"It {how} in {dag.base}{casts}.")
    rows = [
        (op_class, kinds.total(), ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), _MEANING[op_class])
        for op_class, kinds in _kinds_by_class(dag).items()
    ]
    print_table(console, ("class", "operators", "of kind", "in a plan they"), rows)
    share = sum(operator.flops for operator in dag.adjustable) / max(1, sum(operator.flops for operator in dag.operators))
    console.print(f"{len(dag.adjustable)} operators can be lowered; they do {share:.1%} of the forward pass's operations")
    _render_not_applicable(dag, console)
    sizes = ", ".join(format_bytes(bucket.nbytes) for bucket in dag.buckets)
    console.print(f"{len(dag.buckets)} gradient buckets, first ready first: {sizes or 'none'}")
    console.print(f"wrote {output}")


def _render_not_applicable(dag: PrecisionDag, console: Console) -> None:
    refused = [operator for operator in dag.operators if operator.not_applicable]
    if not refused:
        return
    console.print(f"{len(refused)} cannot be lowered:")
    rows = ((operator.op_id, operator.kind, operator.not_applicable) for operator in refused[:_SHOWN])
    print_table(console, ("operator", "kind", "why not"), rows)
    if len(refused) > _SHOWN:
        console.print(f"and {len(refused) - _SHOWN} more (--json lists all)")
