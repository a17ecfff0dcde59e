"""Accelerators that compile their model: predictions are of eager steps, which ``qsync prepare`` says."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from qsync_torch.integrations.accelerate import compiles


@pytest.mark.parametrize(("backend", "found"), [("eager", True), ("no", False)])
def test_an_accelerator_that_was_told_from_outside_to_compile_is_known(monkeypatch, backend, found):
    """As by ``accelerate launch --dynamo_backend`` or a Trainer's ``torch_compile``, of which the script's text says nothing."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert compiles(Accelerator(cpu=True)) is found
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
