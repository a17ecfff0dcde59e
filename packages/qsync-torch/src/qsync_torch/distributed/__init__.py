"""What all ranks must agree on: the plan, the group of each process, the loss scale."""

import torch.distributed as dist

if dist.is_available():
    from qsync_torch.distributed.group_defaults import hold_no_group

    # Before DistributedDataParallel imports the compiler, and with it the functions that would hold the job's group.
    hold_no_group()
