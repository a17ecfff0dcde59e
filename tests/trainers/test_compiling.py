"""Accelerators that compile their model: predictions are of eager steps, which `qsync prepare` says."""

from __future__ import annotations

import warnings

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from qsync_torch.integrations.accelerate import warn_of_compiling


@pytest.mark.parametrize("backend", ["eager", "no"])
def test_an_accelerator_that_was_told_from_outside_to_compile_is_named(monkeypatch, backend):
    """As by ``accelerate launch --dynamo_backend`` or a Trainer's ``torch_compile``, of which the script's text says nothing."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warn_of_compiling(Accelerator(cpu=True))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    told = [str(warning.message) for warning in said if "predictions are of the eager step" in str(warning.message)]
    assert [text.partition(" compiles")[0] for text in told] == ["the accelerator (dynamo_backend='eager')"] * (backend == "eager")
