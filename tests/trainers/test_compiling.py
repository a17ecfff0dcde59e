"""Accelerators that compile their model, whose whole steps ``qsync prepare`` measures so."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from qsync_core.ir.profile import Compiled
from qsync_torch.integrations.accelerate import compiles


@pytest.mark.parametrize(("backend", "found"), [("eager", Compiled(around_ddp=True, backend="eager")), ("no", None)])
def test_an_accelerator_that_was_told_from_outside_to_compile_is_known(monkeypatch, backend, found):
    """As by ``accelerate launch --dynamo_backend`` or a Trainer's ``torch_compile``, of which the script's text says nothing."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert compiles(Accelerator(cpu=True)) == found
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
