"""``qsync prepare``: from a job to a finished run folder, on the machines that will train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qsync_core.cli.options import plan_options
from qsync_core.cli.output import emit, json_option, print_table
from qsync_core.errors import ClusterError, QSyncError
from qsync_core.units import format_bytes, format_ns
from qsync_torch.cli.options import PATH, batch_size_option, chains_option, chosen_device, device_option, quieten_torch, tune_option

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_torch.prepare.flow import Prepared
    from qsync_torch.prepare.participants import Wish


@click.command()
@click.argument("job")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("run"),
    show_default=True,
    help="The run folder; on every machine.",
)
@device_option
@click.option("--cluster", "cluster_path", type=PATH, help="Cluster file: roles, shares, budgets and ladders as you say.")
@click.option(
    "--group",
    "wishes",
    multiple=True,
    metavar="NAME=…",
    help="What you want of a group: NAME=role:infer,share:0.5,memory:20GiB, each part as needed; once per group.",
)
@batch_size_option()
@plan_options
@chains_option
@tune_option
@click.option("--fresh", is_flag=True, help="Keep nothing of an earlier run.")
@json_option
def prepare(
    job: str,
    arguments: tuple[str, ...],
    output: Path,
    device: str,
    cluster_path: Path | None,
    wishes: tuple[str, ...],
    batch_size: int | None,
    chains: bool,
    tune_s: float,
    fresh: bool,
    json_flag: bool,
    **asked: Any,
) -> None:
    """Make the run folder of JOB: graph, profiles, communication, plans for all groups that may be left, and a report.

    Start it as training is started, under torchrun on all machines: torchrun … -m qsync prepare train.py:make_job -o run; or
    without torchrun on one device.  JOB is file.py:function, a named model (resnet50, bert-base:seq=384), or a script with the line
    qsync.hybrid(...), whose own ARGUMENTS stand behind --.

    What is finished is kept for as long as nothing changes that it depends on: start the same command again after an interruption,
    or after you have corrected cluster.toml.
    """
    quieten_torch()
    from qsync_torch.distributed.ranks import KIND_OF_DEVICE, members_to_be, together
    from qsync_torch.load_job import is_script
    from qsync_torch.prepare.asked import Asked
    from qsync_torch.prepare.flow import Request
    from qsync_torch.prepare.flow import prepare as run_prepare
    from qsync_torch.prepare.folder import WHAT
    from qsync_torch.prepare.participants import Wish

    wanted = Wish.parse_all(wishes)
    if cluster_path is not None and wanted:
        raise QSyncError("--cluster and --group both describe groups; use one of them")
    if is_script(job, arguments) and chains:
        raise QSyncError(
            f"--chains plans fused kernels, which run where a model is compiled by qsync.compile(model, plan), and {job} says "
            "qsync.hybrid(...), which runs it eagerly: prepare the job as file.py:function, or leave --chains out"
        )
    try:
        with together(WHAT, slow=True, group=members_to_be("start")) as facts:
            text = _text_of(cluster_path)
            share = _take_share(device, cluster_path, output, wanted)
            target = chosen_device(device)
            facts[KIND_OF_DEVICE] = target.type
        request = Request(
            job=job,
            output=output,
            device=target,
            share=share,
            arguments=arguments,
            batch_size=batch_size,
            cluster=text,
            wishes=wanted,
            asked=Asked(**asked),
            chains=chains,
            tune_s=tune_s,
            fresh=fresh,
        )
        found = run_prepare(request)
    except KeyboardInterrupt:
        raise QSyncError(
            f"qsync prepare was interrupted (Ctrl-C); start it again, and it continues from what is finished in {output}"
        ) from None
    if found.rank == 0:
        emit(json_flag, _facts(found), lambda console: _render(found, console))


def _text_of(path: Path | None) -> str | None:
    """A cluster file that reads as one.

    Raises:
        ClusterError: when it does not.
    """
    from qsync_core.cluster_file import read_cluster

    if path is None:
        return None
    read_cluster(path)
    return path.read_text(encoding="utf-8")


def _take_share(device: str, cluster: Path | None, output: Path, wishes: dict[str, Wish]) -> float:
    """This process's share of its device; on a GPU it is taken, before anything starts CUDA.

    Raises:
        QSyncError: when it cannot be.
    """
    from qsync_core.cluster_file import read_cluster
    from qsync_core.run_folder import RunFolder
    from qsync_torch.distributed.ranks import GROUP_VARIABLE, asked_share
    from qsync_torch.sharing.share import find_share, is_gpu, take_sms

    own = os.environ.get(GROUP_VARIABLE, "")
    share, who = asked_share(os.environ) or 1.0, "this process"
    described = cluster or RunFolder(output).cluster
    if own in wishes and (wished := wishes[own].share):
        share, who = wished, f"group {own!r} (--group)"
    elif described.is_file():
        try:
            found = find_share(read_cluster(described), own or None)
            share, who = found.fraction, f"group {found.group!r}"
        except QSyncError as error:
            if cluster is not None:
                raise ClusterError(f"{cluster}: {error}") from None  # else it is seen once all groups are known
    if is_gpu(device):
        take_sms(share, who)
    return share


def _facts(found: Prepared) -> dict[str, Any]:
    return {
        "output": str(found.run.path),
        "groups": [
            {
                "name": group.name,
                "device": group.device,
                "count": group.count,
                "role": str(group.role),
                "share": group.share,
                "memory_bytes": group.memory_bytes,
                "ladder": [rung.label for rung in group.ladder],
            }
            for group in found.cluster.groups
        ],
        "plans": [
            {
                "groups": list(entry.groups),
                "plan": None if entry.plan is None else str(found.run.plan(entry.groups)),
                "iteration_ns": None if entry.plan is None else entry.plan.predicted_iteration_ns,
                "verdict": None if entry.plan is None or entry.plan.verdict is None else entry.plan.verdict.sentence,
                "local_batches": {} if entry.plan is None else dict(entry.plan.local_batches),
                "why_none": entry.why_none,
            }
            for entry in found.planned
        ],
        "train_with": list(found.start.groups) if found.start else [group.name for group in found.cluster.groups],
        "commands": [line for _, line in found.start.commands] if found.start else [],
        "made": list(found.made),
        "report": None if found.report is None else str(found.report),
        "seconds": round(found.seconds, 1),
    }


def _render(found: Prepared, console: Console) -> None:
    rows = []
    for group in found.cluster.groups:
        device = f"{group.count} × {group.device}" + (f", {group.share:.0%} of each" if group.share < 1 else "")
        memory = format_bytes(group.memory_bytes) if group.memory_bytes else "no limit"
        rows.append((group.name, device, group.role, " ".join(rung.label for rung in group.ladder), memory))
    print_table(console, ("group", "device", "role", "ladder", "memory"), rows)
    plans = []
    for entry in found.planned:
        plan = entry.plan
        said = entry.why_none if plan is None else plan.verdict.sentence if plan.verdict else ""
        plans.append((" + ".join(entry.groups), format_ns(plan.predicted_iteration_ns) if plan else "none", said))
    print_table(console, ("plan for", "predicted step", ""), plans)
    what = f"made {len(found.made)} parts" if found.made else "nothing had changed"
    console.print(f"{what} in {found.seconds:.0f} s; where {found.run.cluster} is wrong, correct it and run this again")
    if found.report is not None:
        console.print(f"report: {found.report}")
    if found.start is None:
        console.print("some of the groups to train with are not here: train with their machines too")
        return
    for sentence in found.start.sentences(found.run.path):
        console.print(sentence, soft_wrap=True)
