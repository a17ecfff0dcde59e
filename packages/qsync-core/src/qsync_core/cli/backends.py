"""``qsync backends``: which kernel backends there are, and what each would do with a model's operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qsync_core.artifact import load
from qsync_core.backend import KernelBackend, KernelRequest, Op
from qsync_core.cli.output import emit, json_option
from qsync_core.dag import Operator, PrecisionDag
from qsync_core.precision import Precision
from qsync_core.registry import Registry
from qsync_core.variant import Variant

if TYPE_CHECKING:
    from rich.console import Console

_FORWARD_OP = {"linear": Op.LINEAR_OUTPUT, "conv2d": Op.CONV2D_OUTPUT}


@click.command()
@click.argument("dag", required=False, type=click.Path(path_type=Path))
@click.option("--device", "device_kind", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option("--compute-capability", default="", help="Of the CUDA device, for example 7.5.")
@json_option
def backends(dag: Path | None, device_kind: str, compute_capability: str, json_flag: bool) -> None:
    """List kernel backends; with a DAG also which of its operators each can run, and why not the others."""
    found = Registry.load().backends()
    data: dict[str, Any] = {"backends": [_describe(backend) for backend in found]}
    if dag is not None:
        graph = load(dag, PrecisionDag)
        data["operators"] = [
            _coverage(operator, precision, found, device_kind, compute_capability)
            for operator in _distinct(graph)
            for precision in Precision
        ]

    def render(console: Console) -> None:
        from rich.table import Table

        if not found:
            console.print("no kernel backend is installed; qsync-torch brings the reference backend, aten")
        table = Table("backend", "operator", "formats", "devices", "from capability", box=None, pad_edge=False)
        for backend in data["backends"]:
            for spec in backend["kernels"]:
                row = (backend["name"], spec["op"], " ".join(spec["compute"]), " ".join(spec["device_kinds"]))
                table.add_row(*row, spec["min_compute_capability"] or "any")
        console.print(table)
        for entry in data.get("operators", ()):
            refused = "; ".join(f"{name}: {', '.join(why)}" for name, why in entry["reasons"].items())
            console.print(
                f"{entry['operator']} {entry['precision']}: {', '.join(entry['backends']) or 'none'} {refused}", markup=False
            )

    emit(json_flag, data, render)


def _describe(backend: KernelBackend) -> dict[str, Any]:
    return {
        "name": backend.name,
        "api_version": backend.api_version,
        "kernels": [attrs.asdict(spec) for spec in backend.kernel_specs()],
    }


def _distinct(graph: PrecisionDag) -> list[Operator]:
    """One adjustable operator per distinct kind and shapes."""
    return list({operator.cost_key: operator for operator in reversed(graph.adjustable) if operator.kind in _FORWARD_OP}.values())[
        ::-1
    ]


def _coverage(
    operator: Operator, precision: Precision, backends: list[KernelBackend], device_kind: str, compute_capability: str
) -> dict[str, Any]:
    request = KernelRequest(
        op=_FORWARD_OP[operator.kind],
        variant=Variant.of(precision),
        shapes=(operator.input_shapes[0], operator.weight_shape),
        attributes=operator.attributes,
        device_kind=device_kind,
        compute_capability=compute_capability,
    )
    reasons = {backend.name: backend.unsupported_reasons(request) for backend in backends}
    return {
        "operator": str(operator.op_id),
        "precision": str(precision),
        "backends": [name for name, why in reasons.items() if not why],
        "reasons": {name: why for name, why in reasons.items() if why},
    }
