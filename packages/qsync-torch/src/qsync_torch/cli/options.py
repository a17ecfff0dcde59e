"""Options that several commands share, and the ladder of variants that they name."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qsync_core.artifacts.atomic_file import check_writable, is_stream
from qsync_core.cli.options import Command
from qsync_core.cli.output import say
from qsync_core.cluster_file import read_cluster
from qsync_core.errors import ClusterError, QSyncError
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from qsync_core.ir.cluster import DeviceGroup
    from qsync_core.ir.dag import PrecisionDag
    from qsync_torch.job import Job

AUTO_DEVICE = "auto"
PATH = click.Path(path_type=Path)
ANY_CHIPS_RUNGS = "int8,bfloat16,float16,float32"
"""Observed where no option names a ladder: with both formats of int8's gradients, the standard ladders of all chips."""


dag_option = click.option("--dag", "dag_path", type=PATH, help="The job's graph (qsync trace); traced anew without it.")
"""``--dag``; the command's parameter is ``dag_path: Path | None``."""


def graph_of(job: Job, dag_path: Path | None) -> PrecisionDag:
    """What ``--dag`` names, which must be this job's graph; without it a new trace.

    Raises:
        QSyncError: when the file holds no graph, or another job's.
    """
    from qsync_core.artifacts.files import load
    from qsync_core.ir.dag import PrecisionDag
    from qsync_torch.job import check_same_job, check_same_model
    from qsync_torch.tracing.trace import trace

    if dag_path is None:
        return trace(job)
    dag = load(dag_path, PrecisionDag)
    check_same_model(job, dag)
    check_same_job(dag, trace(job))
    return dag


def graph_named(job: str, arguments: Sequence[str], batch_size: int | None) -> PrecisionDag:
    """The graph in a file, or that of a job: a named model, a function, or a script with its arguments.

    Raises:
        QSyncError: when the text names none, or its job cannot be loaded or traced.
    """
    from qsync_core.artifacts.files import load
    from qsync_core.ir.dag import PrecisionDag
    from qsync_torch.capturing.script import job_of_script
    from qsync_torch.load_job import is_script, job_code, load_job
    from qsync_torch.tracing.trace import trace

    of_script = is_script(job, arguments)
    path = Path(job)
    if path.exists() and not path.is_dir() and path.suffix != ".py":
        if batch_size is not None:
            raise QSyncError(f"{job} is a graph, whose batch size is fixed; give --batch-size to 'qsync trace'")
        return load(path, PrecisionDag)
    with job_code(job):
        if not of_script:
            return trace(load_job(job, batch_size))
        found = job_of_script(job, arguments).job
        return trace(found if batch_size is None else attrs.evolve(found, batch_size=batch_size))


device_option = click.option(
    "--device", default=AUTO_DEVICE, show_default=True, help="cpu, cuda or cuda:0; auto: cuda where there is one, else cpu."
)
"""``--device``; the command's parameter is ``device: str``, for :func:`chosen_device`."""

tune_option = click.option(
    "--tune",
    "tune_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="On a GPU, how long kernels that were never tuned are tuned first; 0: not at all.",
)
"""``--tune``; the command's parameter is ``tune_s: float``, :data:`qsync_torch.tuning.job_tuning.TUNING_S` by default."""

chains_option = click.option(
    "--chains", is_flag=True, help="Measure fused chains too, for plans; training is then by qsync.compile."
)
"""``--chains``; the command's parameter is ``chains: bool``."""


def quieten_torch() -> None:
    """Leave out a warning, before torch is imported: of memory that was there before its memory profiler, which is by design."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def chosen_device(text: str) -> torch.device:
    """The device that ``--device`` means; where it left the choice, what was chosen is printed on standard error.

    Under torchrun ``auto`` is the CUDA device of the process's number on its machine, where that many are visible.

    Raises:
        QSyncError: when this machine does not have it.
    """
    import torch

    from qsync_torch.devices import device_type, parse_device

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own = text == AUTO_DEVICE and local_rank < torch.cuda.device_count()
    device = parse_device(f"cuda:{local_rank}" if own and "LOCAL_RANK" in os.environ else text)
    if text == AUTO_DEVICE:
        name = "" if device.type == "cpu" else f" ({device_type(device).name})"
        say(f"device: {device}{name}; --device chooses another")
    return device


def batch_size_option(which: str = "Samples per rank and step.") -> Callable[[Command], Command]:
    """``--batch-size``; the command's parameter is ``batch_size: int | None``."""
    return click.option("--batch-size", type=click.IntRange(min=1), help=f"{which}  [the job's]")


def partial_file(output: Path) -> Path | None:
    """The file in which an interrupted command keeps what it has: beside its output; None where that is a device or a pipe.

    Raises:
        ArtifactError: when nothing can be written there.
    """
    if is_stream(output):
        return None
    partial = output.with_name(output.name + ".partial")
    check_writable(partial)
    return None if is_stream(partial) else partial


def remove_partial(partial: Path | None) -> None:
    """Remove what an interrupted command kept, if anything."""
    if partial is not None:
        partial.unlink(missing_ok=True)


@attrs.frozen
class LadderChoice:
    """What ``--rungs``, ``--cluster`` and ``--group`` say."""

    rungs: str | None
    cluster: Path | None
    group_name: str | None

    @property
    def group(self) -> DeviceGroup | None:
        """The group of the cluster file; without a name, its only one; None without a cluster file.

        Raises:
            ClusterError: when there is no such group.
            QSyncError: when ``--rungs`` names a ladder too.
        """
        if self.cluster is None:
            return None
        if self.rungs is not None:
            raise QSyncError("--rungs and --cluster both give a ladder; use one of them")
        cluster = read_cluster(self.cluster)
        names = [entry.name for entry in cluster.groups]
        if self.group_name is None and len(names) > 1:
            raise ClusterError(f"{self.cluster} describes the groups {', '.join(names)}; say which one with --group")
        if self.group_name is not None and self.group_name not in names:
            raise ClusterError(f"{self.cluster} has no group {self.group_name!r}; its groups are {', '.join(names)}")
        return cluster.group(self.group_name or names[0])

    def variants(self, sixteen_bit: Precision) -> tuple[Variant, ...]:
        """The group's ladder, or the variants of ``--rungs``; none where no option names a ladder.

        Args:
            sixteen_bit: the device's 16-bit format for the gradients of 8-bit operators.

        Raises:
            QSyncError: naming the entry that is no variant.
        """
        if group := self.group:
            return group.ladder
        if self.rungs is None:
            return ()
        variants = tuple(_variant(entry, sixteen_bit) for entry in filter(None, (part.strip() for part in self.rungs.split(","))))
        if not variants:
            raise QSyncError("--rungs names no precision; write for example --rungs int8,bfloat16,float32")
        return tuple(dict.fromkeys(variants))


def ladder_options(default: str) -> Callable[[Command], Command]:
    """``--rungs``, ``--cluster`` and ``--group``; the command's parameter is ``ladder: LadderChoice``."""

    def decorate(command: Command) -> Command:
        @click.option("--rungs", help=f"Precisions or variants a plan may use.  [{default}]")
        @click.option("--cluster", "cluster_path", type=PATH, help="Take ladder (and a profile's share) from this file's group.")
        @click.option("--group", help="Which group of the cluster file.")
        @functools.wraps(command)
        def call(*args: Any, rungs: str | None, cluster_path: Path | None, group: str | None, **named: Any) -> Any:
            return command(*args, ladder=LadderChoice(rungs, cluster_path, group), **named)

        return call

    return decorate


def _variant(entry: str, sixteen_bit: Precision) -> Variant:
    """A variant by its name, or as :meth:`Variant.parse` reads it."""
    try:
        return Variant.parse(entry) if ";" in entry else Variant.named(entry, sixteen_bit=sixteen_bit)
    except ValueError as error:
        problem = str(error) if ";" in entry else f"not a precision: {entry!r}; known are {', '.join(Precision)}"
        raise QSyncError(f"--rungs: {problem}") from None
