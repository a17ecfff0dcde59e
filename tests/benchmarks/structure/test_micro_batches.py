"""Row S11 on fewer steps: errors of micro-batches average out as if each were rounded with numbers of its own."""

import pytest
import torch

from qsync_torch.operators import casts
from structure.micro_batches import cases, ratio

TRIALS = 150


@pytest.mark.parametrize("name", list(cases()))
def test_errors_of_micro_batches_average_out(name):
    found = ratio(cases()[name], TRIALS)
    assert found.standard_error < 0.07
    assert found.value < 1.03 + 3 * found.standard_error


def test_weights_that_draw_by_their_own_bits_would_not_average_out(monkeypatch):
    """The measurement tells: by what a weight is itself, it is rounded alike in all micro-batches."""

    def by_itself(weight, binding, seed, stream, *, straight=False):
        return original(weight, binding, seed, torch.full_like(stream, offset[0]), straight=straight)

    original, offset = casts.cast_weight, [0]

    def counted(case, trials, offset_of):
        def note(trial, batch):
            offset[0] = offset_of(trial, batch)
            return offset[0]

        return errors(case, trials, note)

    from qsync_torch.operators import linear
    from structure import micro_batches

    errors = micro_batches.errors
    monkeypatch.setattr(linear, "cast_weight", by_itself)
    monkeypatch.setattr(micro_batches, "errors", counted)
    assert ratio(cases()["nearly equal"], 60).value > 1.2
