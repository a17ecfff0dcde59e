"""``python captured_job.py SCRIPT``: run a script up to its line, and say as JSON what job it handed over."""

from __future__ import annotations

import json
import sys

from torch.nn.functional import cross_entropy

from qsync_torch.capturing.script import job_of_script
from qsync_torch.job import describe_optimizer
from qsync_torch.tracing.trace import trace

said = job_of_script(sys.argv[1])
job, caller = said.job, said.caller
batch = job.batch(0, job.batch_size)
found = {
    "name": job.name,
    "line": caller.line("run"),
    "batch_size": job.batch_size,
    "accumulate": job.accumulate,
    "reads_loss": job.reads_loss,
    "operators": [str(operator.op_id) for operator in trace(job).adjustable],
    "optimizer": describe_optimizer(job),
    "loss": job.compute_loss(batch, job.copy_model()).item(),
}
if hasattr(job.model, "net"):
    images, labels = batch.args[0]
    found["loss_by_hand"] = cross_entropy(job.model.net(images), labels).item()
print(json.dumps(found))
