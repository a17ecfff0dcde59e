"""Whether a graph belongs to a job, before hours are spent on measuring the wrong one."""

from __future__ import annotations

from qsync_core.dag import PrecisionDag
from qsync_core.errors import QSyncError
from qsync_torch.job import Job

_ADVICE = "run 'qsync trace' for this job"


def check_same_model(job: Job, dag: PrecisionDag) -> None:
    """Compare the parameters' names and shapes, and the batch size.

    Raises:
        QSyncError: naming the first difference.
    """
    ours = {name: tuple(parameter.shape) for name, parameter in job.model.named_parameters()}
    theirs = {parameter.fqn: parameter.shape for parameter in dag.parameters}
    for name in [*theirs, *ours]:
        if name not in ours or name not in theirs:
            where = "the job" if name in ours else "the graph"
            raise QSyncError(
                f"the graph ({dag.model}) is of another model than the job ({job.name}): only {where} has {name}; {_ADVICE}"
            )
        if ours[name] != theirs[name]:
            raise QSyncError(
                f"the graph ({dag.model}) is of another model than the job ({job.name}): parameter {name} has shape "
                f"{list(ours[name])} in the job and {list(theirs[name])} in the graph; {_ADVICE}"
            )
    if job.batch_size != dag.batch_size:
        raise QSyncError(
            f"the graph was traced with batch size {dag.batch_size} and the job has {job.batch_size}; "
            f"give --batch-size {dag.batch_size}, or {_ADVICE}"
        )
