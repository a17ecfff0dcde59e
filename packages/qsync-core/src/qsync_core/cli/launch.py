"""``qsync launch``: how a job is prepared and started on every machine, on Kubernetes, or by Ray on Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
from click.core import ParameterSource

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.cli.options import Assignment, output_option
from qsync_core.cli.output import emit, json_option, say

if TYPE_CHECKING:
    from rich.console import Console

    from qsync_core.launching.machines import PlannedJob


_RANKS = Assignment("GROUP=NUMBER", "infer=2")
_SELECT = Assignment("GROUP=LABEL=VALUE", "infer=nvidia.com/gpu.product=Tesla-T4")
_RESOURCE = Assignment("GROUP=RESOURCE", "infer=nvidia.com/gpu.shared")
_CLAIM = Assignment("CLAIM=PATH", "runs=/workspace")
_LABEL = Assignment("LABEL=VALUE", "team=vision")
_TOLERATION = Assignment("GROUP=TAINT", "infer=nvidia.com/gpu=present:NoSchedule")


_FOR_MANIFEST = (
    "image", "name", "namespace", "directory", "queue", "labels", "tolerations", "selectors", "resources", "shared_memory",
    "claims", "output",
)  # fmt: skip
"""Options that lines of torchrun have no use for."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--prepare",
    "cluster_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Start 'qsync prepare' of SCRIPT for the groups of this cluster file; RUN is then what it makes.",
)
@click.option("--group", "groups", multiple=True, help="Start these groups only; the run folder must have a plan for them.")
@click.option(
    "--per-machine",
    "ranks",
    type=_RANKS,
    multiple=True,
    help="Processes on each machine of a group; by default all are on one.",
)
@click.option("--elastic", is_flag=True, help="Machines may come and go: as few as the smallest set of groups with a plan has.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 10_000),
    help="After a process has failed; by default 3, and with --elastic, where every machine that is lost is one, 100.",
)
@click.option("--master-addr", default="HOST", show_default=True, help="The first machine's name or address.")
@click.option("--master-port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="A port of it.")
@click.option("--jobset", "as_jobset", is_flag=True, help="Write a Kubernetes JobSet.")
@click.option("--rayjob", "as_rayjob", is_flag=True, help="Write a RayJob of KubeRay, whose script makes a TorchTrainer.")
@click.option("--image", default="", help="Container image, with torch, QSync and the script.")
@click.option("--name", default="", help="Of the manifest; by default the run folder's, with -prepare behind it under --prepare.")
@click.option("--namespace", default="", help="Of the manifest; by default kubectl's.")
@click.option("--workdir", "directory", default="", help="Where the script is started; by default the image's own.")
@click.option("--queue", default="", help="Kueue's queue in which the job waits.")
@click.option("--label", "labels", type=_LABEL, multiple=True, help="Label of the manifest and of its pods.")
@click.option("--tolerate", "tolerations", type=_TOLERATION, multiple=True, help="Taint of nodes that a group's pods put up with.")
@click.option(
    "--select", "selectors", type=_SELECT, multiple=True, help="Node label of a group, in the place of its GPU's product."
)
@click.option("--resource", "resources", type=_RESOURCE, multiple=True, help="Resource that stands for a group's GPUs.")
@click.option("--shm", "shared_memory", default="8Gi", show_default=True, help="Size of /dev/shm in each pod.")
@click.option("--claim", "claims", type=_CLAIM, multiple=True, help="Mount a PersistentVolumeClaim, such as the run folder's.")
@output_option("manifest", required=False)
@json_option
def launch(
    run: Path,
    script: tuple[str, ...],
    cluster_path: Path | None,
    groups: tuple[str, ...],
    ranks: tuple[tuple[str, str], ...],
    elastic: bool,
    max_restarts: int | None,
    master_addr: str,
    master_port: int,
    as_jobset: bool,
    as_rayjob: bool,
    image: str,
    name: str,
    namespace: str,
    directory: str,
    queue: str,
    labels: tuple[tuple[str, str], ...],
    tolerations: tuple[tuple[str, str], ...],
    selectors: tuple[tuple[str, str], ...],
    resources: tuple[tuple[str, str], ...],
    shared_memory: str,
    claims: tuple[tuple[str, str], ...],
    output: Path | None,
    json_flag: bool,
) -> None:
    """Say how the job of a run folder is started: torchrun's line for every machine, or a manifest for Kubernetes.

    With --prepare the same of 'qsync prepare', on every machine as training will run.

    \b
    qsync launch run/ --master-addr node0 -- train.py --epochs 3
    qsync launch run/ --prepare cluster.toml --jobset --image registry.example.com/train:1.0 -- train.py | kubectl apply -f -
    qsync launch run/ --jobset --image registry.example.com/train:1.0 -- train.py | kubectl apply -f -
    qsync launch run/ --rayjob --image registry.example.com/train:1.0 -- train_ray.py run/ | kubectl apply -f -
    """
    import yaml

    from qsync_core.cluster_file import read_cluster
    from qsync_core.launching.jobset import jobset
    from qsync_core.launching.machines import described_job, planned_job
    from qsync_core.launching.pods import PodSettings, Taint
    from qsync_core.launching.rayjob import rayjob
    from qsync_core.launching.torchrun import Meeting, machine_commands, preparing, training
    from qsync_core.run_folder import RunFolder

    if as_jobset and as_rayjob:
        raise click.UsageError("--jobset and --rayjob are two manifests of one job: ask for one of them")
    ranks_each = {group: _number(group, text) for group, text in ranks}
    if cluster_path is None:
        job = planned_job(RunFolder(run), groups, ranks_each)
        started = list(script) if as_rayjob else training(script)
    else:
        if elastic or groups:
            raise click.UsageError(
                f"{'--elastic' if elastic else '--group'} is for training: all ranks of the cluster file's groups prepare"
            )
        job = described_job(read_cluster(cluster_path), ranks_each)
        _note_unknown_chips(job)
        started = list(script) if as_rayjob else preparing(script, str(run), str(cluster_path))
    meeting = Meeting(master_addr, master_port, elastic=elastic)
    if max_restarts is not None:
        meeting = attrs.evolve(meeting, max_restarts=max_restarts)
    if not (as_jobset or as_rayjob):
        context = click.get_current_context()
        for option in context.command.params:
            said = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
            if option.name in _FOR_MANIFEST and said:
                raise click.UsageError(f"{option.opts[0]} is for --jobset and --rayjob")
        found = machine_commands(job, meeting, started)

        def render(console: Console) -> None:
            last = None
            for machine in found:
                if machine.group != last:
                    console.print(f"# group {machine.group}: {machine.device}", style="dim", soft_wrap=True)
                last = machine.group
                console.print(machine.line(), soft_wrap=True)

        emit(json_flag, {"machines": [_machine(machine) for machine in found]}, render)
        return
    if elastic and as_rayjob:
        raise click.UsageError("--elastic is torchrun's: in a RayJob the script's ScalingConfig says how few workers do")
    taints: dict[str, list[Taint]] = {}
    for group, text in tolerations:
        taints.setdefault(group, []).append(Taint.parse(text))
    settings = PodSettings(
        image,
        namespace,
        _by_group(selectors),
        dict(resources),
        shared_memory,
        dict(claims),
        directory=directory,
        queue=queue,
        labels=dict(labels),
        tolerations=taints,
    )
    write = rayjob if as_rayjob else jobset
    text = write(job, name or _default_name(run, preparing=cluster_path is not None), settings, started, meeting)
    if output is not None:
        write_atomically(output, text.encode())
    facts = {"manifest": yaml.safe_load(text)} | ({"output": str(output)} if output else {})
    emit(json_flag, facts, lambda console: _render_manifest(console, text, output))


def _note_unknown_chips(job: PlannedJob) -> None:
    """Say where a cluster file's device may be misspelt."""
    from qsync_core.devices import chips_like, find_chip
    from qsync_core.ir.profile import DeviceKind

    for machines in job.groups:
        if machines.device.kind is DeviceKind.CUDA and find_chip(machines.device.name) is None:
            near = " or ".join(chips_like(machines.device.name))
            say(
                f"note: no known chip is called {machines.device.name!r}, the device of group {machines.name!r}"
                f"{f' (did you mean {near}?)' if near else ''}: 'qsync prepare' refuses ranks whose device has another name"
            )


def _by_group(pairs: tuple[tuple[str, str], ...]) -> dict[str, dict[str, str]]:
    """Labels of ``KEY=VALUE`` by group."""
    found: dict[str, dict[str, str]] = {}
    for group, label in pairs:
        key, _, value = label.partition("=")
        found.setdefault(group, {})[key] = value
    return found


def _number(group: str, text: str) -> int:
    if not text.isdecimal():
        raise click.BadParameter(f"processes on each machine of group {group!r} are a number, got {text!r}")
    return int(text)


def _default_name(run: Path, *, preparing: bool) -> str:
    """The folder's name, as far as it is one for Kubernetes; what is not is refused there."""
    return re.sub(r"[_.]", "-", run.resolve().name.lower()) + ("-prepare" if preparing else "")


def _machine(machine: Any) -> dict[str, Any]:
    return {**attrs.asdict(machine), "line": machine.line()}


def _render_manifest(console: Console, text: str, output: Path | None) -> None:
    if output is not None:
        console.print(f"wrote {output}; start it with 'kubectl apply -f {output}'", soft_wrap=True)
    else:
        console.print(text, soft_wrap=True, end="")
