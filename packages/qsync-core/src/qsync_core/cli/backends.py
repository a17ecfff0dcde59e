"""``qsync backends``: which kernel backends there are, and what each would do with a model's operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qsync_core.artifacts.files import load
from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.devices import find_chip
from qsync_core.errors import BackendError, QSyncError
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant, ladder_under
from qsync_core.kernels.backend import KernelBackend
from qsync_core.kernels.choice import FLOAT_BACKEND
from qsync_core.kernels.requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.plugins.backends import Answer
from qsync_core.plugins.hooks import DeviceFacts
from qsync_core.plugins.registry import Registry
from qsync_core.tuning.store import TuningStore, default_store_path
from qsync_core.units import format_ns

if TYPE_CHECKING:
    from rich.console import Console

Entry = dict[str, Any]
_NOT_ASKED = "it is not asked for operators in float formats, which run PyTorch's own kernels"
_CAPABILITY = re.compile(r"\d{1,2}\.\d")


@click.command()
@click.argument("job", required=False)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Where to run: cpu, cuda or cuda:0; auto: cuda where there is one, else cpu.",
)
@click.option("--compute-capability", default="", help="Of a CUDA device that is not here, for example 7.5.")
@click.option("--device-name", default="", help="Of a CUDA device that is not here, whose tuning records are shown: T4.")
@click.option("--rungs", default="int8", show_default=True, help="Precisions or variants, separated by commas.")
@click.option("--tuning", type=click.Path(path_type=Path), default=None, help="Tuning file.  [$QSYNC_TUNING or the cache]")
@json_option
def backends(
    job: str | None,
    device: str,
    compute_capability: str,
    device_name: str,
    rungs: str,
    tuning: Path | None,
    json_flag: bool,
) -> None:
    """List kernel backends; with a JOB also who would run its operators, how fast, and why not the others.

    JOB is a traced graph (qsync trace), a named model (resnet50, bert-base:seq=384) or file.py:function.  Every kernel is shown
    that its distinct operators need, forward and backward, with the configuration and latency that qsync tune found.
    """
    registry = Registry.load()
    data: dict[str, Any] = {"backends": [_describe(backend) for backend in registry.backends()]}
    data["disabled"] = dict(registry.disabled)
    facts = _device_facts(registry, device, compute_capability, device_name)
    if job is not None:
        graph = _graph(job, registry)
        variants, _ = ladder_under(graph.base, _variants(rungs, facts))
        store = _store(facts, tuning, registry)
        data["device"] = {"kind": facts.kind, "name": facts.name, "compute_capability": facts.compute_capability}
        data["operators"] = coverage(graph, variants, registry, facts.kind, facts.compute_capability, store)
    emit(json_flag, data, lambda console: _render(console, data))


def _device_facts(registry: Registry, device: str, compute_capability: str, name: str) -> DeviceFacts:
    """The device that is asked about: one that the person describes, or one that an installed package finds here.

    Raises:
        QSyncError: when the options contradict each other or are not of their form.
    """
    kind = device.split(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise QSyncError(f"--device is auto, cpu, cuda or cuda:0, got {device!r}")
    if compute_capability and not _CAPABILITY.fullmatch(compute_capability):
        raise QSyncError(f"--compute-capability is two numbers as in 7.5 or 9.0, got {compute_capability!r}")
    if kind == "cpu" and (compute_capability or name):
        raise QSyncError("--compute-capability and --device-name describe a CUDA device; add --device cuda")
    chip = find_chip(name) if name else None
    if compute_capability or name:
        capability = compute_capability or (chip.compute_capability if chip else "")
        if not capability:
            raise QSyncError(f"{name!r} is not a known chip, so add its --compute-capability, for example 7.5")
        return DeviceFacts("cuda", name, capability, None)
    return registry.describe_device(device) or DeviceFacts("cpu" if kind == "auto" else kind, "", "", None)


def _graph(job: str, registry: Registry) -> PrecisionDag:
    path = Path(job)
    if path.exists() and path.suffix != ".py":
        return load(path, PrecisionDag)
    graph = registry.trace_job(job)
    if graph is None:
        raise QSyncError(
            f"there is no file {job}, and no installed package that could trace a job of that name; install qsync-torch"
            + registry.all_disabled()
        )
    return graph


def _variants(rungs: str, facts: DeviceFacts) -> list[Variant]:
    chip_is_old = facts.compute_capability and float(facts.compute_capability) < 8
    sixteen_bit = Precision.FLOAT16 if chip_is_old else Precision.BFLOAT16
    found = []
    for entry in filter(None, (part.strip() for part in rungs.split(","))):
        try:
            found.append(Variant.parse(entry) if ";" in entry else Variant.named(entry, sixteen_bit=sixteen_bit))
        except ValueError:
            raise QSyncError(f"--rungs: not a precision or variant: {entry!r}; known are {', '.join(Precision)}") from None
    if not found:
        raise QSyncError("--rungs names no precision; write for example --rungs int8,bfloat16")
    return list(dict.fromkeys(found))


def _store(facts: DeviceFacts, tuning: Path | None, registry: Registry) -> TuningStore | None:
    """Tuning records of the device; of whatever software where it is not here."""
    if not facts.name:
        return None
    versions = None if facts.software is None else registry.backend_versions()
    return TuningStore(tuning or default_store_path(), facts.name, facts.software, versions)


def coverage(
    graph: PrecisionDag,
    variants: Sequence[Variant],
    registry: Registry,
    device_kind: str,
    compute_capability: str,
    store: TuningStore | None,
) -> list[Entry]:
    """One entry for every kernel, forward and backward, of each distinct operator in each variant.

    Args:
        variants: in which they could run.
        store: tuning records, if there are any for that device.
    """
    return [
        _entry(operator, variant, asked, registry, store)
        for operator in _distinct(graph)
        for variant in variants
        for asked in operator_requests(CallShapes.of(operator), variant, device_kind, compute_capability)
    ]


def _distinct(graph: PrecisionDag) -> list[Operator]:
    """One adjustable operator per distinct kind, shapes and need of gradients: the first in the order of execution."""
    found: dict[tuple[object, ...], Operator] = {}
    for operator in graph.adjustable:
        found.setdefault((operator.cost_key, operator.no_grad_inputs), operator)
    return list(found.values())


def _entry(operator: Operator, variant: Variant, asked: OperatorRequest, registry: Registry, store: TuningStore | None) -> Entry:
    answers = registry.answers(asked.request, store=store)
    if not variant.compute.needs_scale:
        answers = [answer if answer.backend == FLOAT_BACKEND else Answer(answer.backend, (_NOT_ASKED,)) for answer in answers]
    try:
        chosen: Answer | None = registry.choose(asked.request, answers)
    except BackendError:
        chosen = None
    able = [answer for answer in answers if not answer.reasons]
    return {
        "operator": str(operator.op_id),
        "precision": variant.label,
        "kernel": asked.role,
        "shapes": [list(shape) for shape in asked.request.shapes],
        "backends": [answer.backend for answer in able],
        "chosen": None if chosen is None else _result(chosen),
        "others": [_result(answer) for answer in able if answer is not chosen],
        "reasons": {answer.backend: list(answer.reasons) for answer in answers if answer.reasons},
    }


def _result(answer: Answer) -> Entry:
    """Backend, configuration and what was measured."""
    return attrs.asdict(answer, filter=attrs.filters.exclude("reasons"))


def _render(console: Console, data: dict[str, Any]) -> None:
    if not data["backends"]:
        console.print("no kernel backend is installed; qsync-torch brings the reference backend, aten")
    kernels = [
        (
            backend["name"],
            spec["op"],
            " ".join(spec["compute"]),
            " ".join(spec["device_kinds"]),
            spec["min_compute_capability"] or "any",
        )
        for backend in data["backends"]
        for spec in backend["kernels"]
    ]
    print_table(console, ("backend", "operator", "formats", "devices", "from capability"), kernels)
    for plugin, reason in data["disabled"].items():
        console.print(f"plugin {plugin} is disabled: {reason}", style="yellow", soft_wrap=True)
    if "operators" not in data:
        return
    entries = data["operators"]
    console.print("\nWho would run the model's distinct operators:")
    who: list[tuple[str, ...]] = []
    last = None
    for entry in entries:
        shapes = " · ".join("×".join(map(str, shape)) for shape in entry["shapes"])
        head = (entry["operator"], entry["precision"])
        shown = ("", "") if head == last else head
        last = head
        chosen = entry["chosen"]
        if chosen is None:
            who.append((*shown, entry["kernel"], shapes, "none", "", "", ""))
            continue
        others = "  ".join(" ".join(filter(None, (other["backend"], _latency(other)))) for other in entry["others"])
        measured = (chosen["backend"], chosen["config"] or "–", _latency(chosen) or "not tuned")
        who.append((*shown, entry["kernel"], shapes, *measured, others or "–"))
    print_table(console, ("operator", "as", "kernel", "shapes", "backend", "configuration", "latency", "others"), who)
    refusals = Counter((name, why) for entry in entries for name, said in entry["reasons"].items() for why in said)
    if refusals:
        console.print("\nWhy not:")
    for (name, why), count in sorted(refusals.items()):
        console.print(f"{name}: {why} ({count} of {len(entries)} kernels)", soft_wrap=True)


def _latency(result: dict[str, Any]) -> str:
    """What was measured; with ≈ where it is scaled from other shapes."""
    if result["latency_ns"] is None:
        return ""
    return ("" if result["exact"] else "≈") + format_ns(result["latency_ns"])


def _describe(backend: KernelBackend) -> dict[str, Any]:
    return {
        "name": backend.name,
        "api_version": backend.api_version,
        "kernels": [attrs.asdict(spec) for spec in backend.kernel_specs()],
    }
