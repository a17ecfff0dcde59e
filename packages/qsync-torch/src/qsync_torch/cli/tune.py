"""``qsync tune``: measure the kernels of a job's operators here and remember the fastest, or compile them ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from qsync_core.artifacts import files as artifact
from qsync_core.cli.output import emit, json_option, progress_bar
from qsync_core.errors import QSyncError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.units import format_ns

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.variant import Variant
    from qsync_core.kernels.backend import KernelBackend
    from qsync_core.tuning.store import TuningStore
    from qsync_torch.tuning.job_tuning import JobTuning


@click.command()
@click.argument("job", required=False)
@click.option("--device", default="cuda", show_default=True, help="cpu, cuda or cuda:0.")
@click.option("--rungs", default=None, help="Precisions or variants a plan may use.  [int8, with float32 and 16-bit output]")
@click.option("--cluster", "cluster_path", type=click.Path(path_type=Path), help="Take the ladder from this file's group.")
@click.option("--group", default=None, help="Which group of the cluster file.")
@click.option("--batch-size", type=click.IntRange(min=1), default=None, help="Samples per rank and step.  [the job's]")
@click.option("--backend", default=None, help="Backends to tune, joined by +.  [all that are installed]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=None, help="The tuning file.  [$QSYNC_TUNING or the cache]"
)
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
@click.option(
    "--merge", "merged", type=click.Path(path_type=Path), multiple=True, help="Join this tuning file into the output; repeatable."
)
@json_option
def tune(
    job: str | None,
    device: str,
    rungs: str | None,
    cluster_path: Path | None,
    group: str | None,
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

    JOB is a traced graph (qsync trace), a named model (resnet50, bert-base:seq=384) or file.py:function.  Every measurement is kept
    at once, so an interrupted run continues when it is started again, and several may run at the same time.  qsync profile then
    measures with the fastest.

    With --merge, tuning files (of other machines, say) are joined into the output:
    qsync tune --merge a.jsonl --merge b.jsonl -o c.jsonl
    """
    _refuse_ignored(bool(merged), compile_only, cluster_path)
    if merged:
        _merge(merged, output, job, json_flag)
        return
    if job is None:
        raise QSyncError("qsync tune needs a JOB to tune (a graph, a named model or file.py:function), or files to --merge")
    if arch is not None and not compile_only:
        raise QSyncError("--arch goes with --compile-only; without it the device's own architecture is compiled for")
    if compile_only:
        _compile(job, arch, rungs, cluster_path, group, batch_size, backend, json_flag)
        return
    from qsync_torch.devices import gradient_format, parse_device
    from qsync_torch.kernels.binding import device_facts
    from qsync_torch.kernels.store import open_store
    from qsync_torch.tuning.job_tuning import Effort, distinct_requests, tune_requests

    target = parse_device(device)
    ladder = _ladder(rungs, cluster_path, group, gradient_format(target))
    dag = _graph(job, batch_size)
    backends = _backends(backend)
    requests = distinct_requests(dag, ladder, *device_facts(target))
    store = open_store(target, output)
    if not requests:
        said = _nothing_to_do(dag, ladder)
        facts = {"store": str(store.path), "seconds": 0.0, "reused": 0, "kernels": [], "note": said}
        emit(json_flag, facts, lambda console: console.print(said, markup=False))
        return
    with progress_bar("tune") as update:
        found = tune_requests(requests, backends, store, target, effort=Effort(budget=budget, kernels=kernels), progress=update)
    emit(json_flag, _facts(found, store.path), lambda console: _render(found, store, console))


_WITH_MERGE = {"merged", "output", "job", "json_flag"}
_NOT_WITH_COMPILE_ONLY = {"output": "--output", "budget": "--budget", "kernels": "--kernels", "device": "--device"}


def _refuse_ignored(merging: bool, compile_only: bool, cluster_path: Path | None) -> None:
    """Refuse options that would change nothing.

    Raises:
        click.UsageError: naming them.
    """
    context = click.get_current_context()
    by_person = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    given = [p for p in context.command.params if p.name is not None and context.get_parameter_source(p.name) in by_person]
    if merging:
        if others := [p.opts[-1] for p in given if p.name not in _WITH_MERGE]:
            raise click.UsageError(f"--merge joins files and tunes nothing, so {', '.join(others)} cannot go with it.")
        return
    others = [_NOT_WITH_COMPILE_ONLY[p.name] for p in given if p.name in _NOT_WITH_COMPILE_ONLY]
    if compile_only and others:
        raise click.UsageError(
            f"--compile-only measures nothing and writes no tuning file, so {', '.join(others)} cannot go with it."
        )
    if cluster_path is None and any(p.name == "group" for p in given):
        raise click.UsageError("--group names a group of a cluster file; give --cluster too.")


def _nothing_to_do(dag: PrecisionDag, ladder: Sequence[Variant]) -> str:
    """Why there is no kernel to tune or to compile, in a sentence."""
    if any(variant.compute.needs_scale for variant in ladder):
        return f"{dag.model} has no operator whose precision can be lowered, so there is nothing to tune or compile."
    formats = ", ".join(dict.fromkeys(str(variant.compute) for variant in ladder))
    return f"operators in float formats ({formats}) run PyTorch's own kernels, of which there is nothing to tune or compile."


def _ladder(rungs: str | None, cluster_path: Path | None, group: str | None, sixteen_bit: Any) -> tuple[Variant, ...]:
    from qsync_core.ir.precision import Precision
    from qsync_core.ir.variant import Variant
    from qsync_torch.cli.ladder import ladder_of_group, read_rungs

    if cluster_path is not None and rungs is not None:
        raise QSyncError("--rungs and --cluster both give a ladder; use one of them")
    if cluster_path is not None:
        return ladder_of_group(cluster_path, group)[0]
    if rungs is not None:
        return read_rungs(rungs, sixteen_bit)
    int8 = Precision.INT8
    return Variant.of(int8, sixteen_bit=sixteen_bit), Variant.of(int8, sixteen_bit=sixteen_bit, output=sixteen_bit)


def _graph(job: str, batch_size: int | None) -> PrecisionDag:
    """The graph in a file, or that of a job."""
    path = Path(job)
    if path.is_file() and path.suffix != ".py":
        if batch_size is not None:
            raise QSyncError(f"{job} is a graph, whose batch size is fixed; give --batch-size to 'qsync trace'")
        return artifact.load(path, PrecisionDag)
    from qsync_torch.load_job import load_job
    from qsync_torch.tracing.trace import trace

    return trace(load_job(job, batch_size))


def _backends(names: str | None) -> list[KernelBackend]:
    from qsync_core.kernels.choice import split_chain
    from qsync_torch.kernels.selection import find_backends

    return list(find_backends(split_chain(names or "auto")))


def _compile(
    job: str,
    arch: str | None,
    rungs: str | None,
    cluster_path: Path | None,
    group: str | None,
    batch_size: int | None,
    backend: str | None,
    json_flag: bool,
) -> None:
    from qsync_core.ir.precision import Precision
    from qsync_core.kernels.backend import CompilingBackend
    from qsync_torch.tuning.job_tuning import capability_of, compile_requests, distinct_requests

    if arch is None:
        raise QSyncError("--compile-only needs --arch, the chip to compile for, for example --arch sm_75")
    capability = capability_of(arch)
    major = int(capability.split(".")[0])
    ladder = _ladder(rungs, cluster_path, group, Precision.BFLOAT16 if major >= 8 else Precision.FLOAT16)
    backends = _backends(backend)
    dag = _graph(job, batch_size)
    requests = distinct_requests(dag, ladder, "cuda", capability)
    if not requests:
        said = _nothing_to_do(dag, ladder)
        facts = {"arch": arch, "requests": 0, "backends": {}, "note": said}
        emit(json_flag, facts, lambda console: console.print(said, markup=False))
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
    emit(json_flag, data, lambda console: console.print("\n".join(lines), markup=False))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _merge(inputs: tuple[Path, ...], output: Path | None, job: str | None, json_flag: bool) -> None:
    from qsync_core.tuning.store import default_store_path, merge_stores

    if job is not None:
        # `qsync tune --merge a b` reads b as JOB; two files are what people mean by that.
        inputs = (*inputs, Path(job))
    target = output or default_store_path()
    count = merge_stores(inputs, target)
    data = {"output": str(target), "records": count}
    emit(json_flag, data, lambda console: console.print(f"wrote {target}: {count} tuned kernels", markup=False))


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
    from rich.table import Table

    from qsync_torch.tuning.job_tuning import describe

    table = Table("kernel", "fastest", "configuration", "latency", "others", box=None, pad_edge=False)
    for entry in found.requests:
        best = entry.best
        if best is None:
            table.add_row(describe(entry.asked), "nobody", "", "", "; ".join(entry.refusals))
            continue
        others = sorted((r for r in entry.records if r is not best), key=lambda record: record.latency_ns)
        said = "  ".join(f"{record.key.backend} {format_ns(record.latency_ns)}" for record in others)
        table.add_row(describe(entry.asked), best.key.backend, best.config or "–", format_ns(best.latency_ns), said or "–")
    console.print(table, markup=False)
    failed = [
        (name, why) for entry in found.requests if entry.best is None for name, said in entry.refusals.items() for why in said
    ]
    if failed:
        console.print("\nWhy nobody:")
        for name, why in dict.fromkeys(failed):
            console.print(f"{name}: {why}", markup=False, soft_wrap=True)
        console.print(
            "a failure is kept for the backend's version; when it is repaired, raise the version of its package or tune into "
            "another file (-o)\n",
            markup=False,
            soft_wrap=True,
        )
    count = sum(len(entry.records) for entry in found.requests)
    again = f", {found.reused} of them known already" if found.reused else ""
    where = f"wrote {store.path}" if store.added else f"nothing was added to {store.path}"
    kernels = _counted(len(found.requests), "kernel")
    searches = "1 search" if count == 1 else f"{count} searches"
    console.print(f"{searches} for {kernels} in {found.seconds:.1f} s{again}; {where}", markup=False)
