"""A worker of the demo, started by torchrun: ``python -m qsync_torch.demo.worker KIND TASK.json``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qsync_core.errors import QSyncError
from qsync_torch.demo.parent_death import die_with_parent
from qsync_torch.demo.worker_events import report_error


def main(kind: str, path: str) -> int:
    """Do the task; the exit status."""
    from qsync_torch.demo.cores import pin_to_core
    from qsync_torch.demo.rendezvous import Rendezvous
    from qsync_torch.demo.tasks import GROUPS, MeasureTask, TrainTask, read_json

    die_with_parent()
    rank = int(os.environ["RANK"])
    core = pin_to_core(rank)
    os.environ["QSYNC_GROUP"] = GROUPS[rank]
    try:
        if kind == "measure":
            from qsync_torch.demo.measuring import measure

            measure(read_json(Path(path), MeasureTask), Rendezvous(), core)
        else:
            from qsync_torch.demo.training import train

            train(read_json(Path(path), TrainTask), Rendezvous(), core)
    except QSyncError as error:
        report_error(str(error))
        return 1
    except Exception as error:
        report_error(f"the {GROUPS[rank]} worker failed while it should {kind}: {type(error).__name__}: {error}; see {kind}.log")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
