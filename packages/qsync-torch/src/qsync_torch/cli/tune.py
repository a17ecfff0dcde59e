"""``qsync tune``: measure the kernels of a job's operators here and remember the fastest, or compile them ahead of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from qsync_core.cli.output import emit, json_option, print_table, progress_bar
from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.units import format_ns
from qsync_torch.cli.options import PATH, LadderChoice, batch_size_option, chosen_device, device_option, graph_named, ladder_options

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.kernels.backend import KernelBackend
    from qsync_core.kernels.requests import OperatorRequest
    from qsync_core.tuning.store import TuningStore
    from qsync_torch.tuning.job_tuning import JobTuning


@click.command()
@click.argument("job", required=False)
@device_option
@ladder_options("int8,int8>float32")
@batch_size_option()
@click.option("--backend", default=None, help="Backends to tune, joined by +.  [all that are installed]")
@click.option("-o", "--output", type=PATH, default=None, help="The tuning file.  [$QSYNC_TUNING or the cache]")
@click.option(
    "--budget", type=click.IntRange(min=1), default=24, show_default=True, help="Configurations tried per kernel and backend."
)
@click.option(
    "--kernels",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Kernels that a backend compiles for operators that can share them.",
)
@click.option("--compile-only", is_flag=True, help="Compile the candidates and measure nothing; needs no GPU.")
@click.option("--arch", default=None, help="With --compile-only: the chip, for example sm_75 or sm_90a.")
@click.option("--merge", "merged", type=PATH, multiple=True, help="Join this tuning file into the output; repeatable.")
@json_option
def tune(
    job: str | None,
    device: str,
    ladder: LadderChoice,
    batch_size: int | None,
    backend: str | None,
    output: Path | None,
    budget: int,
    kernels: int,
    compile_only: bool,
    arch: str | None,
    merged: tuple[Path, ...],
    json_flag: bool,
) -> None:
    """Find the fastest kernel configurations for every distinct operator of JOB, forward and backward.

    JOB is a traced graph (qsync trace), a named model (resnet50, bert-base:seq=384), file.py:function or a script with the line
    qsync.hybrid(...).  Every measurement is kept at once, so an interrupted run continues when it is started again, and several may
    run at the same time.  qsync profile then
    measures with the fastest.

    With --merge, tuning files (of other machines, say) are joined into the output:
    qsync tune --merge a.sqlite --merge b.sqlite -o c.sqlite
    """
    _refuse_ignored(bool(merged), compile_only, ladder)
    if merged:
        # `qsync tune --merge a b` reads b as JOB; two files are what people mean by that.
        _merge((*merged, Path(job)) if job else merged, output, json_flag)
        return
    if job is None:
        raise QSyncError("qsync tune needs a JOB to tune (a graph, a named model, a function or a script), or files to --merge")
    if arch is not None and not compile_only:
        raise QSyncError("--arch goes with --compile-only; without it the device's own architecture is compiled for")
    if arch is None and compile_only:
        raise QSyncError("--compile-only needs --arch, the chip to compile for, for example --arch sm_75")
    from qsync_core.kernels.choice import split_chain
    from qsync_core.tuning.search import Effort
    from qsync_torch.devices import device_facts, gradient_format, int8_rungs
    from qsync_torch.kernels.installed import open_store
    from qsync_torch.kernels.selection import find_backends
    from qsync_torch.tuning.job_tuning import capability_of, distinct_requests, tune_requests

    if arch is None:
        target = chosen_device(device)
        sixteen_bit, (kind, capability) = gradient_format(target), device_facts(target)
    else:
        kind, capability = "cuda", capability_of(arch)
        sixteen_bit = Precision.BFLOAT16 if int(capability.split(".")[0]) >= 8 else Precision.FLOAT16
    named = ladder.variants(sixteen_bit)
    backends = list(find_backends(split_chain(backend or "auto")))
    dag = graph_named(job, (), batch_size)
    variants = named or int8_rungs(sixteen_bit, dag if kind == "cuda" else None)
    requests = distinct_requests(dag, variants, kind, capability)
    note = "" if requests else _nothing_to_do(dag, variants)
    if arch is not None:
        _compile(requests, backends, arch, note, json_flag)
        return
    store = open_store(target, output)
    if note:
        facts = {"store": str(store.path), "seconds": 0.0, "reused": 0, "kernels": [], "note": note}
        emit(json_flag, facts, lambda console: console.print(note))
        return
    with progress_bar("tune") as update:
        found = tune_requests(requests, backends, store, target, effort=Effort(budget=budget, kernels=kernels), progress=update)
    emit(json_flag, _facts(found, store.path), lambda console: _render(found, store, console))


_WITH_MERGE = {"merged", "output", "job", "json_flag"}
_NOT_WITH_COMPILE_ONLY = {"output": "--output", "budget": "--budget", "kernels": "--kernels", "device": "--device"}


def _refuse_ignored(merging: bool, compile_only: bool, ladder: LadderChoice) -> None:
    """Refuse options that would change nothing.

    Raises:
        click.UsageError: naming them.
    """
    context = click.get_current_context()
    by_user = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    given = [p for p in context.command.params if p.name is not None and context.get_parameter_source(p.name) in by_user]
    if merging:
        if others := [p.opts[-1] for p in given if p.name not in _WITH_MERGE]:
            raise click.UsageError(f"--merge joins files and tunes nothing, so {', '.join(others)} cannot go with it.")
        return
    others = [_NOT_WITH_COMPILE_ONLY[p.name] for p in given if p.name in _NOT_WITH_COMPILE_ONLY]
    if compile_only and others:
        raise click.UsageError(
            f"--compile-only measures nothing and writes no tuning file, so {', '.join(others)} cannot go with it."
        )
    if ladder.cluster is None and ladder.group_name is not None:
        raise click.UsageError("--group names a group of a cluster file; give --cluster too.")


def _nothing_to_do(dag: PrecisionDag, ladder: Sequence[Variant]) -> str:
    """Why there is no kernel to tune or to compile, in a sentence."""
    if any(variant.compute.needs_scale for variant in ladder):
        return f"{dag.model} has no operator whose precision can be lowered, so there is nothing to tune or compile."
    formats = ", ".join(dict.fromkeys(str(variant.compute) for variant in ladder))
    return f"operators in float formats ({formats}) run PyTorch's own kernels, of which there is nothing to tune or compile."


def _compile(requests: Sequence[OperatorRequest], backends: Sequence[KernelBackend], arch: str, note: str, json_flag: bool) -> None:
    from qsync_core.kernels.backend import CompilingBackend
    from qsync_torch.tuning.job_tuning import compile_requests

    if note:
        facts = {"arch": arch, "requests": 0, "backends": {}, "note": note}
        emit(json_flag, facts, lambda console: console.print(note))
        return
    able = [one for one in backends if isinstance(one, CompilingBackend)]
    if not able:
        names = ", ".join(one.name for one in backends)
        raise QSyncError(f"no backend of {names} compiles ahead of time; install qsync-kernels-cutlass")
    with progress_bar("compile") as update:
        done = compile_requests(requests, able, arch, update)
    refused = {
        one.name: sorted({why for asked in requests for why in one.unsupported_reasons(asked.request)})
        for one in able
        if one.name not in done
    }
    if refused:
        said = "; ".join(f"{name}: {', '.join(why)}" for name, why in refused.items())
        raise QSyncError(f"no kernel was compiled for {arch} ({said})")
    data = {
        "arch": arch,
        "requests": len(requests),
        "backends": {name: {"requests": made.requests, "compiled_kernels": made.kernels} for name, made in done.items()},
    }
    lines = [
        f"{name}: {'kernels' if made.kernels is None else _counted(made.kernels, 'kernel')} for {made.requests} of "
        f"{_counted(len(requests), 'request')} on {arch}"
        for name, made in done.items()
    ]
    emit(json_flag, data, lambda console: console.print("\n".join(lines)))


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{plural}"


def _merge(inputs: tuple[Path, ...], output: Path | None, json_flag: bool) -> None:
    from qsync_core.tuning.store import default_store_path, merge_stores

    target = output or default_store_path()
    count = merge_stores(inputs, target)
    data = {"output": str(target), "records": count}
    emit(json_flag, data, lambda console: console.print(f"wrote {target}: {count} tuned kernels"))


def _facts(found: JobTuning, path: Path) -> dict[str, Any]:
    kernels = []
    for entry in found.requests:
        request = entry.asked.request
        best = entry.best
        kernels.append(
            {
                "role": entry.asked.role,
                "op": request.op,
                "variant": str(request.variant),
                "shapes": [list(shape) for shape in request.shapes],
                "attributes": request.attributes,
                "best": None if best is None else best.key.backend,
                "backends": {
                    record.key.backend: {"config": record.config, "latency_ns": record.latency_ns, "tried": record.tried}
                    for record in entry.records
                },
                "reasons": {name: list(why) for name, why in entry.refusals.items()},
            }
        )
    return {"store": str(path), "seconds": round(found.seconds, 3), "reused": found.reused, "kernels": kernels}


def _render(found: JobTuning, store: TuningStore, console: Console) -> None:
    from qsync_torch.tuning.job_tuning import describe

    rows = []
    for entry in found.requests:
        best = entry.best
        if best is None:
            rows.append((describe(entry.asked), "none", "", "", "; ".join(entry.refusals)))
            continue
        others = sorted((r for r in entry.records if r is not best), key=lambda record: record.latency_ns)
        said = "  ".join(f"{record.key.backend} {format_ns(record.latency_ns)}" for record in others)
        rows.append((describe(entry.asked), best.key.backend, best.config or "–", format_ns(best.latency_ns), said or "–"))
    print_table(console, ("kernel", "fastest", "configuration", "latency", "others"), rows)
    failed = [
        (name, why) for entry in found.requests if entry.best is None for name, said in entry.refusals.items() for why in said
    ]
    if failed:
        console.print("\nWhy none:")
        for name, why in dict.fromkeys(failed):
            console.print(f"{name}: {why}", soft_wrap=True)
    left_out = Counter(
        (f"{name}, {entry.asked.request.op}", "; ".join(said))
        for entry in found.requests
        if entry.best is not None
        for name, said in entry.failures.items()
    )
    for (what, why), count in left_out.items():
        console.print(f"left out: {what} ({_counted(count, 'kernel')}): {why}", soft_wrap=True)
    if failed or left_out:
        console.print(
            "a failure is kept for the backend's version; when it is repaired, raise the version of its package or tune into "
            "another file (-o)\n",
            soft_wrap=True,
        )
    count = sum(len(entry.records) for entry in found.requests)
    again = f", {found.reused} of them known already" if found.reused else ""
    where = f"wrote {store.path}" if store.added else f"nothing was added to {store.path}"
    kernels = _counted(len(found.requests), "kernel")
    console.print(f"{_counted(count, 'search', 'es')} for {kernels} in {found.seconds:.1f} s{again}; {where}")
