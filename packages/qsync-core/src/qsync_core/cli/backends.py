"""``qsync backends``: which kernel backends there are, and what each would do with a model's operators."""

from __future__ import annotations

import math
from collections import Counter
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

    emit(json_flag, data, lambda console: _render(console, data))


def _render(console: Console, data: dict[str, Any]) -> None:
    from rich.table import Table

    if not data["backends"]:
        console.print("no kernel backend is installed; qsync-torch brings the reference backend, aten")
    kernels = Table("backend", "operator", "formats", "devices", "from capability", box=None, pad_edge=False)
    for backend in data["backends"]:
        for spec in backend["kernels"]:
            row = (backend["name"], spec["op"], " ".join(spec["compute"]), " ".join(spec["device_kinds"]))
            kernels.add_row(*row, spec["min_compute_capability"] or "any")
    console.print(kernels)
    if "operators" in data:
        console.print("\nWho can run the model's distinct operators (forward), by precision:")
        coverage = Table("operator", "shapes", *Precision, box=None, pad_edge=False)
        by_operator: dict[str, list[dict[str, Any]]] = {}
        for entry in data["operators"]:
            by_operator.setdefault(entry["operator"], []).append(entry)
        for name, entries in by_operator.items():
            shapes = " · ".join("×".join(str(size) for size in shape) for shape in entries[0]["shapes"])
            coverage.add_row(name, shapes, *(" ".join(entry["backends"]) or "–" for entry in entries))
        console.print(coverage, markup=False)
        refusals = Counter((name, why) for entry in data["operators"] for name, said in entry["reasons"].items() for why in said)
        if refusals:
            console.print("\nWhy not:")
        for (name, why), count in sorted(refusals.items()):
            console.print(f"{name}: {why} ({count} of {len(data['operators'])})", markup=False, soft_wrap=True)


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
    activation = operator.input_shapes[0]
    if operator.kind == "linear":
        activation = (math.prod(activation[:-1]), activation[-1])
    request = KernelRequest(
        op=_FORWARD_OP[operator.kind],
        variant=Variant.of(precision),
        shapes=(activation, operator.weight_shape),
        attributes=operator.attributes,
        device_kind=device_kind,
        compute_capability=compute_capability,
    )
    reasons = {backend.name: backend.unsupported_reasons(request) for backend in backends}
    return {
        "operator": str(operator.op_id),
        "precision": str(precision),
        "shapes": request.shapes,
        "backends": [name for name, why in reasons.items() if not why],
        "reasons": {name: why for name, why in reasons.items() if why},
    }
