"""Checkpoints in files: safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compatibility.job import LOWERED, STEPS, batch, difference, loss_of, make_model, state_of
from qsync_torch import apply_

safetensors = pytest.importorskip("safetensors.torch")
VARIANTS = {name: str(precision) for name, precision in LOWERED.items()}


def steps(model: torch.nn.Module, numbers: range) -> None:
    """Without momentum, which safetensors does not keep."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in numbers:
        optimizer.zero_grad()
        loss_of(model(batch(step, 0))).backward()
        optimizer.step()


@pytest.mark.parametrize("whole", [True, False])
def test_safetensors(tmp_path: Path, whole: bool) -> None:
    """Of the model or of its state: the names of a plain model, float32, and training goes on with the same bits."""
    path = tmp_path / "model.safetensors"
    unbroken, model, resumed = make_model(), make_model(), make_model()
    apply_(unbroken, VARIANTS, seed=3)
    steps(unbroken, range(STEPS))
    applied = apply_(model, VARIANTS, seed=3)
    steps(model, range(STEPS - 1))
    safetensors.save_model(model, path) if whole else safetensors.save_file(model.state_dict(), path)
    stored = safetensors.load_file(path)
    assert sorted(stored) == sorted(make_model().state_dict())
    assert {value.dtype for name, value in stored.items() if "num_batches" not in name} == {torch.float32}
    plain = make_model()
    safetensors.load_model(plain, path)
    assert difference(state_of(plain), state_of(model)) == 0
    again = apply_(resumed, VARIANTS, seed=3)
    safetensors.load_model(resumed, path) if whole else resumed.load_state_dict(stored)
    again.load_state_dict(applied.state_dict())
    steps(resumed, range(STEPS - 1, STEPS))
    assert difference(state_of(resumed), state_of(unbroken)) == 0
