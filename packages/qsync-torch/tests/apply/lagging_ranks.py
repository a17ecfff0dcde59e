"""What one of three ranks runs, of which the second is slow: ``lagging_ranks.py RANK STORE``.  Prints its warnings as JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings

import attrs
import torch
import torch.distributed as dist
from communicating_plans import plan_with, small_model
from torch.nn.parallel import DistributedDataParallel

from qsync_torch import apply_
from qsync_torch.apply import lag

MS = 1_000_000
PREDICTED_NS = 100 * MS
SLOW_S = 0.25


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
    lag.FIRST_SAMPLE, lag.STEPS, lag._LATE = 2, 6, 3
    plan = plan_with(None)
    train, infer = (attrs.evolve(group, predicted_busy_ns=PREDICTED_NS) for group in plan.groups)
    plan = attrs.evolve(plan, groups=(attrs.evolve(train, count=2), infer), predicted_iteration_ns=PREDICTED_NS)
    model = small_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_(model, plan, group=["train", "infer", "train"][rank])
        ddp = DistributedDataParallel(model)
        for _ in range(18):
            ddp(torch.randn(4, 3, 8, 8)).sum().backward()
            if rank == 1:
                time.sleep(SLOW_S)
    print(json.dumps([str(one.message) for one in caught if "slower than its plan" in str(one.message)]))
    del ddp
    dist.destroy_process_group()


main()
