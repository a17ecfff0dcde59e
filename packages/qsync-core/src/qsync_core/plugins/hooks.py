"""The hooks that a plugin may implement (entry-point group ``qsync``); ``docs/hooks.md`` shows the smallest example of each.

A plugin is a module or object with functions marked ``@hookimpl``.  Every hook is optional.  A hook that raises disables the plugin
that implements it, by name, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from qsync_core.kernels.backend import KernelBackend, KernelRequest
from qsync_core.progress import ProgressCallback

if TYPE_CHECKING:
    import click

    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.observations import Observations
    from qsync_core.ir.variant import Variant
    from qsync_core.plugins.doctor import DoctorLine, JobFindings

ENTRY_POINT_GROUP = "qsync"

hookspec = pluggy.HookspecMarker("qsync")
hookimpl = pluggy.HookimplMarker("qsync")


@attrs.frozen
class Candidate:
    """A backend that can run a request: its name, and what tuning measured for its best configuration (None: not tuned)."""

    backend: str
    config: str = ""
    latency_ns: int | None = None


@attrs.frozen
class DeviceFacts:
    """A device, as far as kernels depend on it.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: as tuning records have it; empty where it is unknown.
        compute_capability: ``9.0`` and so on, empty on a CPU.
        software: versions that latencies depend on; None for a device that is not here.
    """

    kind: str
    name: str = ""
    compute_capability: str = ""
    software: Mapping[str, str] | None = attrs.field(default=None, hash=False)


@attrs.frozen(eq=False)
class TruthRequest:
    """What ``qsync indicate --check`` wants to have measured.

    Attributes:
        job: the name of a model, or ``file.py:function``.
        observations: what the indicators were computed from; seed, warm-up and batch size say which updates to measure.
        variants: in which the adjustable operators are lowered.
        budget_s: seconds that measuring may take.
        device: where; empty for the kind of device in the observations.
        announce: receives the cost in one sentence before measuring starts.
        progress: ``progress(done, total, text)`` moves a progress bar.
        chains: also keep the input of one fused chain at a time in 8 bit.
    """

    job: str
    dag: PrecisionDag
    observations: Observations
    variants: Sequence[Variant]
    budget_s: float
    device: str
    announce: Callable[[str], None]
    progress: ProgressCallback
    chains: bool = False


@hookspec
def qsync_register_backends() -> list[KernelBackend]:  # type: ignore[empty-body]
    """Offer kernel backends.

    When called: once, when the registry is first asked for backends.
    Parameters: none.
    Returns: backends, each with a name that no other has.
    Must not: import torch, compile, or touch a device; ``KernelBackend.build`` is the place for that.
    """


@hookspec(firstresult=True)
def qsync_select_backend(request: KernelRequest, candidates: Sequence[Candidate]) -> str | None:
    """Choose the backend of a request that names none.

    When called: each time such a request is made.
    Parameters: the request; the backends that can run it, by name, at least one.
    Returns: the name of one of them, or None to leave the choice to the next plugin; the first answer counts.  Without any, the
        lowest tuned latency wins (docs/tuning.md#where-nothing-was-tuned).
    Must not: build or run kernels.
    """


@hookspec
def qsync_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``qsync``.

    When called: once, when the command line starts.
    Parameters: a click group; what is added to it becomes ``qsync NAME``.
    Returns: nothing.
    Must not: import torch or other slow modules (import them inside the command), or use the name of an existing command.
    """


@hookspec
def qsync_register_indicators() -> list[Any]:  # type: ignore[empty-body]
    """Offer sensitivity indicators.

    When called: when qsync-planner looks for an indicator by name.
    Parameters: none.
    Returns: objects with the interface ``qsync_planner.indicators.interface.Indicator``.
    Must not: import torch: an indicator is arithmetic on Observations.
    """


@hookspec
def qsync_register_collectors() -> list[Any]:  # type: ignore[empty-body]
    """Offer collectors, which write what indicators need into Observations.

    When called: when ``qsync observe`` starts.
    Parameters: none.
    Returns: objects with the interface ``qsync_torch.observing.collector.Collector``.
    Must not: change the model they observe.
    """


@hookspec(firstresult=True)
def qsync_trace_job(job: str) -> PrecisionDag | None:
    """Turn what people call a job into its graph.

    When called: by ``qsync backends JOB`` where JOB is no file with a graph.
    Parameters: the name of a model, or ``file.py:function``.
    Returns: the graph, or None to leave the job to the next plugin; the first answer counts.
    Must not: change anything; a :class:`~qsync_core.errors.QSyncError` says what is wrong with the job.
    """


@hookspec(firstresult=True)
def qsync_describe_device(device: str) -> DeviceFacts | None:
    """Say what a device of this machine is.

    When called: by core's commands, which cannot ask a device themselves.
    Parameters: ``cpu``, ``cuda`` or ``cuda:0``.
    Returns: what kernels depend on, or None where the plugin does not know the device or it is not here.
    Must not: raise where there is no such device.
    """


@hookspec(firstresult=True)
def qsync_measure_truth(request: TruthRequest) -> Observations | None:
    """Measure how far each operator in each variant really moves the gradients (collector ``montecarlo``).

    When called: by ``qsync indicate --check --job JOB``.
    Parameters: the request.
    Returns: observations with the terms of :mod:`qsync_core.ir.observations`, or None to leave it to the next plugin; the first
    answer
        counts.
    Must not: start before the cost was announced, or take much longer than the budget; a
        :class:`~qsync_core.errors.QSyncError` says what is wrong with the job, or which budget would do.
    """


@hookspec
def qsync_doctor() -> list[DoctorLine]:  # type: ignore[empty-body]
    """Say what this machine can do, as far as the plugin knows.

    When called: by ``qsync doctor``.
    Parameters: none.
    Returns: lines, in the order in which to print them.
    Must not: raise where something is missing; that is a line with status ``warning``.
    """


@hookspec(firstresult=True)
def qsync_doctor_job(timeout_s: float) -> JobFindings | None:
    """Say what the processes of this process's job can do together.

    When called: by ``qsync doctor``, in every process of the job.
    Parameters: how many seconds one collective may take.
    Returns: what was found, or None where this process is of no job of several; the first answer counts.
    Must not: hang, whatever the other processes do.
    """
