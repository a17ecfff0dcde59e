"""``qsync communicate``: measure what communication costs a job, on all of its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qsync_core.artifacts import files as artifact
from qsync_core.cli.options import output_option
from qsync_core.cli.output import emit, json_option, print_table, progress_bar, say
from qsync_core.cluster_file import read_cluster
from qsync_core.errors import ClusterError
from qsync_core.units import format_bytes, format_ns
from qsync_torch.cli.options import PATH, batch_size_option, chosen_device, dag_option, device_option, graph_of

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.ir.cluster import Cluster
    from qsync_core.ir.communication import CollectiveCosts


@click.command()
@click.argument("job")
@dag_option
@output_option("collective costs")
@device_option
@click.option("--cluster", "cluster_path", type=PATH, help="Cluster file, to find each process's group and to check their ranks.")
@batch_size_option()
@json_option
def communicate(
    job: str,
    dag_path: Path | None,
    output: Path,
    device: str,
    cluster_path: Path | None,
    batch_size: int | None,
    json_flag: bool,
) -> None:
    """Measure what communication costs JOB: all-reduces, what they take from compute, copies, the broadcast of buffers.

    Start it under torchrun with all processes of the job, as training is started; each is of the group that QSYNC_GROUP names, or
    that its device has in the cluster file.  Rank 0 writes the output.
    """
    from qsync_torch.distributed.ranks import (
        KIND_OF_DEVICE,
        members_to_be,
        naming_lost_ranks,
        process_group_from_environment,
        together,
    )
    from qsync_torch.distributed.watch import watched
    from qsync_torch.load_job import job_code, load_job
    from qsync_torch.profiling.communication import check_not_alone, measure_communication
    from qsync_torch.sharing.share import find_share, is_gpu, take_sms

    with together("qsync communicate", slow=True, group=members_to_be("start")) as facts:
        if cluster_path and is_gpu(device):  # before anything starts CUDA
            own = find_share(read_cluster(cluster_path))
            take_sms(own.fraction, f"group {own.group!r}")
        target = chosen_device(device)
        facts[KIND_OF_DEVICE] = target.type
    with watched("qsync communicate", members_to_be("watch")) as gone, process_group_from_environment(target) as rank:
        check_not_alone()
        with together("qsync communicate", slow=True), job_code(job):
            cluster = read_cluster(cluster_path) if cluster_path else None
            group, share = _own_group(cluster)
            loaded = load_job(job, batch_size)
            dag = graph_of(loaded, dag_path)
        with job_code(job), naming_lost_ranks("qsync communicate", gone), progress_bar("communicate") as update:
            found = measure_communication(
                loaded,
                dag,
                group=group,
                device=target,
                share=share,
                counts={entry.name: entry.count for entry in cluster.groups} if cluster else None,
                progress=update,
                note=lambda text: say(f"note: {text}") if rank == 0 else None,
            )
        with together("qsync communicate"):
            if rank == 0:
                artifact.save(found, output)
    if rank == 0:
        emit(json_flag, _facts(found, output), lambda console: _render(found, output, console))


def _own_group(cluster: Cluster | None) -> tuple[str, float]:
    """This process's group and its share of the device.

    Raises:
        QSyncError: when neither the environment nor the cluster file tells the group.
    """
    from qsync_torch.distributed.ranks import GROUP_VARIABLE, asked_share, which_group_of_cluster

    if cluster is not None:
        name = which_group_of_cluster(cluster)
        return name, cluster.group(name).share
    name = os.environ.get(GROUP_VARIABLE, "")
    if not name:
        raise ClusterError(f"this process's group is not known: set {GROUP_VARIABLE} for every process, or give --cluster")
    return name, asked_share(os.environ) or 1.0


def _facts(found: CollectiveCosts, output: Path) -> dict[str, object]:
    return {
        "output": str(output),
        "model": found.model,
        "ranks": dict(found.ranks),
        "measured": [
            {
                "max_ctas": entry.max_ctas,
                "all_reduce": [{"bytes": size, "ns": duration} for size, duration in entry.all_reduce.measured],
                "slowdown": dict(entry.slowdown),
            }
            for entry in found.measured
        ],
        "copy_ns_per_byte": dict(found.copy_ns_per_byte),
        "broadcast_ns": found.broadcast_ns,
    }


def _render(found: CollectiveCosts, output: Path, console: Console) -> None:
    console.print(f"{found.model} on {', '.join(f'{count} × {name}' for name, count in found.ranks.items())}")
    sizes = [size for size, _ in found.measured[0].all_reduce.measured]
    header = ["NCCL CTAs", *(f"all-reduce of {format_bytes(size)}" for size in (sizes[0], sizes[-1]))]
    rows = []
    for entry in found.measured:
        times = [format_ns(duration) for _, duration in entry.all_reduce.measured]
        rows.append((entry.max_ctas or "its own", times[0], times[-1], *(f"{entry.slowdown[name]:.1%}" for name in found.ranks)))
    print_table(console, [*header, *(f"{name}'s compute loses" for name in found.ranks)], rows)
    rates = ", ".join(f"{rate * 2**20 / 1000:.1f} µs per MiB on {name}" for name, rate in found.copy_ns_per_byte.items())
    console.print(f"copies of gradients into buckets and back: {rates}")
    console.print(f"broadcast of buffers: {format_ns(found.broadcast_ns)}" if found.broadcast_ns else "no buffers to broadcast")
    console.print(f"wrote {output}")
