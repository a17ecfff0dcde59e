"""Row S11 on fewer steps: errors of micro-batches average out as if each were rounded with numbers of its own."""

import math

import attrs
import pytest
import torch

from qsync_core.ir.precision import Rounding
from qsync_torch.operators import products
from structure import micro_batches
from structure.micro_batches import biases, cases, ratio

TRIALS = 150


@pytest.mark.parametrize("name", list(cases()))
def test_errors_of_micro_batches_average_out(name):
    found = ratio(cases()[name], TRIALS)
    assert found.standard_error < 0.07
    assert found.value < 1.03 + 3 * found.standard_error


def test_weights_that_draw_by_their_own_bits_would_not_average_out(monkeypatch):
    """The measurement tells: by the step and what a weight is itself, it is rounded alike in all micro-batches."""

    def by_itself(weight, binding, seed, stream, *, straight=False):
        if trial:
            stream = torch.full_like(stream, trial[0])
        return cast_weight(weight, binding, seed, stream, straight=straight)

    def errors_of(case, trials, offset_of):
        def note(number, batch):
            offset = offset_of(number, batch)
            trial[:] = [number] if offset == number else []  # independent rounding stays as it is
            return offset

        return errors(case, trials, note)

    trial, errors = [], micro_batches.errors
    cast_weight = products.cast_weight
    monkeypatch.setattr(products, "cast_weight", by_itself)
    monkeypatch.setattr(micro_batches, "errors", errors_of)
    assert ratio(cases()["nearly equal"], 60).value > 1.2


def test_rounding_on_the_same_data_is_unbiased_and_rounding_to_nearest_is_not(monkeypatch):
    assert all(abs(bias.z) < 4 for bias in biases(60))
    nearest = attrs.evolve(micro_batches.INT8, rounding=Rounding.NEAREST)
    monkeypatch.setattr(micro_batches, "INT8", nearest)
    assert all(math.isinf(bias.z) for bias in biases(3))  # the same error in every step
