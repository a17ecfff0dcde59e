"""``qsync launch``: how a prepared job is started on every machine, or on Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.cli.options import output_option
from qsync_core.cli.output import emit, json_option

if TYPE_CHECKING:
    from rich.console import Console


class _Assignment(click.ParamType[Any]):
    """``KEY=VALUE``, which becomes a pair."""

    def __init__(self, name: str, example: str) -> None:
        self.name, self._example = name, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Split at the first ``=``."""
        if isinstance(value, tuple):
            return value
        key, separator, rest = str(value).partition("=")
        if not (separator and key and rest):
            self.fail(f"write {self.name}, for example {self._example}; got {value!r}", param, ctx)
        return key, rest


_RANKS = _Assignment("GROUP=NUMBER", "infer=2")
_SELECT = _Assignment("GROUP=LABEL=VALUE", "infer=nvidia.com/gpu.product=Tesla-T4")
_RESOURCE = _Assignment("GROUP=RESOURCE", "infer=nvidia.com/gpu.shared")
_CLAIM = _Assignment("CLAIM=PATH", "runs=/workspace")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--group", "groups", multiple=True, help="Start these groups only; the run folder must have a plan for them.")
@click.option(
    "--per-machine",
    "ranks",
    type=_RANKS,
    multiple=True,
    help="Processes on each machine of a group; by default all are on one.",
)
@click.option("--elastic", is_flag=True, help="Machines may come and go: as few as the smallest set of groups with a plan has.")
@click.option("--max-restarts", type=click.IntRange(0, 10_000), default=3, show_default=True, help="After a process has failed.")
@click.option("--master-addr", default="HOST", show_default=True, help="The first machine's name or address (without --jobset).")
@click.option("--master-port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="A port of it.")
@click.option("--jobset", "as_jobset", is_flag=True, help="Write a Kubernetes JobSet.")
@click.option("--image", default="", help="Container image, with torch, QSync and the script.")
@click.option("--name", default="", help="Of the JobSet; by default the run folder's.")
@click.option("--namespace", default="", help="Of the JobSet; by default kubectl's.")
@click.option(
    "--select", "selectors", type=_SELECT, multiple=True, help="Node label of a group, in the place of its GPU's product."
)
@click.option("--resource", "resources", type=_RESOURCE, multiple=True, help="Resource that stands for a group's GPUs.")
@click.option("--shm", "shared_memory", default="8Gi", show_default=True, help="Size of /dev/shm in each pod.")
@click.option("--claim", "claims", type=_CLAIM, multiple=True, help="Mount a PersistentVolumeClaim, such as the run folder's.")
@output_option("JobSet", required=False)
@json_option
def launch(
    run: Path,
    script: tuple[str, ...],
    groups: tuple[str, ...],
    ranks: tuple[tuple[str, str], ...],
    elastic: bool,
    max_restarts: int,
    master_addr: str,
    master_port: int,
    as_jobset: bool,
    image: str,
    name: str,
    namespace: str,
    selectors: tuple[tuple[str, str], ...],
    resources: tuple[tuple[str, str], ...],
    shared_memory: str,
    claims: tuple[tuple[str, str], ...],
    output: Path | None,
    json_flag: bool,
) -> None:
    """Say how the job of a run folder is started: torchrun's line for every machine, or with --jobset a JobSet for Kubernetes.

    \b
    qsync launch run/ --master-addr node0 -- train.py --epochs 3
    qsync launch run/ --jobset --image registry.example.com/train:1.0 -- train.py | kubectl apply -f -
    """
    import yaml

    from qsync_core.launching.jobset import PodSettings, jobset
    from qsync_core.launching.machines import planned_job
    from qsync_core.launching.torchrun import Meeting, machine_commands
    from qsync_core.run_folder import RunFolder

    job = planned_job(RunFolder(run), groups, {group: _number(group, text) for group, text in ranks})
    meeting = Meeting(master_addr, master_port, elastic=elastic, max_restarts=max_restarts)
    if not as_jobset:
        for_jobset = {"--image": image, "--select": selectors, "--resource": resources, "--claim": claims, "-o": output}
        given = [option for option, value in for_jobset.items() if value]
        if given:
            raise click.UsageError(f"{given[0]} is for --jobset")
        found = machine_commands(job, meeting, script)

        def render(console: Console) -> None:
            last = None
            for machine in found:
                if machine.group != last:
                    console.print(f"# group {machine.group}: {machine.device}", style="dim", soft_wrap=True)
                last = machine.group
                console.print(machine.line(), soft_wrap=True)

        emit(json_flag, {"machines": [_machine(machine) for machine in found]}, render)
        return

    def by_group(pairs: tuple[tuple[str, str], ...]) -> dict[str, dict[str, str]]:
        labels: dict[str, dict[str, str]] = {}
        for group, label in pairs:
            key, _, value = label.partition("=")
            labels.setdefault(group, {})[key] = value
        return labels

    settings = PodSettings(image, namespace, by_group(selectors), dict(resources), shared_memory, dict(claims))
    text = jobset(job, name or _default_name(run), settings, script, meeting)
    if output is not None:
        write_atomically(output, text.encode())
    facts = {"manifest": yaml.safe_load(text)} | ({"output": str(output)} if output else {})
    emit(json_flag, facts, lambda console: _render_manifest(console, text, output))


def _number(group: str, text: str) -> int:
    if not text.isdecimal():
        raise click.BadParameter(f"processes on each machine of group {group!r} are a number, got {text!r}")
    return int(text)


def _default_name(run: Path) -> str:
    """The folder's name, as far as it is one for Kubernetes; what is not is refused there."""
    return re.sub(r"[_.]", "-", run.resolve().name.lower())


def _machine(machine: Any) -> dict[str, Any]:
    return {**attrs.asdict(machine), "line": machine.line()}


def _render_manifest(console: Console, text: str, output: Path | None) -> None:
    if output is not None:
        console.print(f"wrote {output}; start it with 'kubectl apply -f {output}'", soft_wrap=True)
    else:
        console.print(text, soft_wrap=True, end="")
