import copy

import pytest
import torch
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.demo.measuring import gradient_errors


class Scaled(nn.Linear):
    """A linear layer whose gradients are too large by a known factor."""

    def forward(self, x):
        y = super().forward(x)
        return y + 0.25 * (y - y.detach())


def gradient_error(model, reference, data, loss):
    return gradient_errors({"it": model}, reference, data, loss)["it"]


def square(output, targets):
    return output.square().mean()


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.zeros(8)) for _ in range(3)]


def test_a_gradient_that_is_a_quarter_too_large_is_off_by_a_quarter():
    torch.manual_seed(0)
    assert gradient_error(Scaled(6, 4), nn.Linear(6, 4), batches(), square) == pytest.approx(0.25, rel=1e-5)


def test_dropout_draws_the_same_masks_in_both():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4)).train()
    assert gradient_error(copy.deepcopy(model), model, batches(), square) == 0.0


def test_lower_precision_is_off_by_more_and_both_models_are_left_alone():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 4)).train()
    errors = {}
    for name in ("int8", "bfloat16"):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 4)).train()
        apply_(
            model,
            {
                OpId("0"): Variant.of(Precision(name), rounding=Rounding.FLOOR),
                OpId("3"): Variant.of(Precision(name), rounding=Rounding.FLOOR),
            },
        )
        before = copy.deepcopy([model.state_dict(), reference.state_dict()])
        errors[name] = gradient_error(model, reference, batches(), square)
        for state, entry in zip(before, (model, reference), strict=True):
            for key, value in entry.state_dict().items():
                torch.testing.assert_close(value, state[key], rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert 0 < errors["bfloat16"] < errors["int8"] < 0.2
