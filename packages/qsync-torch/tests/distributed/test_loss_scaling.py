"""Which wrappers a scaler finds around what an optimizer steps; steps are in tests/compatibility/test_ddp.py."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from qsync_torch import InStepGradScaler
from qsync_torch.distributed.loss_scaling import _joins_uneven_inputs


@pytest.mark.parametrize("freezes", [False, True])
def test_a_wrapper_in_join_is_found_by_what_an_optimizer_steps(freezes):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    was_frozen = gc.get_freeze_count() > 0  # pytest's own objects
    try:
        ddp, other = DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
        if freezes:
            gc.freeze()
        ddp.join()
        assert _joins_uneven_inputs(torch.optim.SGD(ddp.parameters(), 0.1))
        assert not _joins_uneven_inputs(torch.optim.SGD(other.parameters(), 0.1))
        assert (gc.get_freeze_count() > 0) == (freezes or was_frozen)
    finally:
        if not was_frozen:
            gc.unfreeze()
        dist.destroy_process_group()


def test_a_wrapper_is_found_that_is_made_after_a_step():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        InStepGradScaler("cpu")
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert not _joins_uneven_inputs(optimizer)
        first = DistributedDataParallel(model)
        assert not _joins_uneven_inputs(optimizer)
        second = DistributedDataParallel(model)  # as for another epoch; the first one is still there
        second.join()
        assert _joins_uneven_inputs(optimizer)
        assert first is not second
    finally:
        dist.destroy_process_group()
