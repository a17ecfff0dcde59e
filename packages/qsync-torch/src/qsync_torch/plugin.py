"""Hook implementations of qsync-torch: its commands, the ``aten`` backend, its collectors and what doctor can say about torch.

Nothing here imports torch until a hook or a command needs it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from qsync_core.errors import QSyncError
from qsync_core.plugins.hooks import hookimpl

if TYPE_CHECKING:
    import click

    from qsync_core.ir.dag import PrecisionDag
    from qsync_core.ir.observations import Observations
    from qsync_core.kernels.backend import KernelBackend
    from qsync_core.plugins.doctor import DoctorLine, JobFindings
    from qsync_core.plugins.hooks import DeviceFacts, TruthRequest


@hookimpl
def qsync_register_commands(cli: click.Group) -> None:
    """``qsync prepare``, ``trace``, ``profile``, ``communicate``, ``observe``, ``tune``, ``bench``, ``watch``,
    ``demo`` and ``fits``."""
    from qsync_torch.cli.bench import bench
    from qsync_torch.cli.communicate import communicate
    from qsync_torch.cli.demo import demo
    from qsync_torch.cli.fits import fits
    from qsync_torch.cli.observe import observe
    from qsync_torch.cli.prepare import prepare
    from qsync_torch.cli.profile import profile
    from qsync_torch.cli.trace import trace
    from qsync_torch.cli.tune import tune
    from qsync_torch.cli.watch import watch

    for command in (prepare, trace, profile, communicate, observe, tune, bench, watch, demo, fits):
        cli.add_command(command)


@hookimpl
def qsync_register_backends() -> list[KernelBackend]:
    """The reference backend."""
    from qsync_torch.aten.backend import AtenBackend

    return [AtenBackend()]


@hookimpl
def qsync_trace_job(job: str) -> PrecisionDag:
    """Named models and functions in files."""
    from qsync_torch.load_job import job_code, load_job
    from qsync_torch.tracing.trace import trace

    with job_code(job):
        return trace(load_job(job))


@hookimpl
def qsync_describe_device(device: str) -> DeviceFacts | None:
    """CPUs and CUDA devices that torch sees."""
    from qsync_torch.devices import describe_device, parse_device

    try:
        return describe_device(parse_device(device))
    except QSyncError:
        return None


@hookimpl
def qsync_register_collectors() -> list[Any]:
    """What the built-in indicators need; ``montecarlo`` runs only where it is asked for."""
    from qsync_torch.observing.closed_form import LossVarCollector
    from qsync_torch.observing.hutchinson import HutchinsonCollector
    from qsync_torch.observing.montecarlo import MonteCarloCollector

    return [HutchinsonCollector(), LossVarCollector(), MonteCarloCollector()]


@hookimpl
def qsync_measure_truth(request: TruthRequest) -> Observations:
    """Measure the truth with the collector ``montecarlo``."""
    from qsync_torch.load_job import job_code
    from qsync_torch.observing.measure_truth import measure_truth

    with job_code(request.job):
        return measure_truth(request)


@hookimpl
def qsync_doctor() -> list[DoctorLine]:
    """torch, devices, precisions, collectives and compilers."""
    from qsync_torch.doctor.machine import doctor_lines

    return doctor_lines()


@hookimpl
def qsync_doctor_job(timeout_s: float) -> JobFindings | None:
    """Devices, versions, collectives and speeds of all ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from qsync_torch.doctor.job import doctor_of_job

    return doctor_of_job(timeout_s)
