import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fused(caplog):
    """What was fused so far, and why what was found was not."""
    caplog.set_level(logging.INFO, "qsync_torch.compiling.rewriting")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "qsync_torch.compiling.rewriting"]
