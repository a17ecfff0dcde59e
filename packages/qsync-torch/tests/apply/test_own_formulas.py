"""Autograd functions whose authors wrote their gradients down: these are no calls of the model, unless they may be either."""

import pytest
import torch
import torch.nn.functional as F

from qsync_torch import apply_

from .own_checkpoints import Block, diffusion
from .small_models import BFLOAT16, INT8, Handwritten, named
from .two_layers import equal, gradients_of


@pytest.fixture
def x(x):
    return x.requires_grad_()


class Both(Handwritten):
    """The weight stands on the right in the forward as well."""

    @staticmethod
    def forward(ctx, x, weight):
        return Handwritten.forward(ctx, x @ weight, weight)


def test_products_of_a_gradient_formula_are_in_full_precision(x):
    class Own(Block):
        def forward(self, x):
            return Handwritten.apply(x, self.right)

    model = Own("", None)
    apply_(model, named(right=INT8), seed=5)
    y = model(x)
    grad = torch.randn(4, 16)
    y.backward(grad)
    (right,) = (parameter for name, parameter in model.named_parameters() if name == "right")
    assert not torch.equal(y, F.linear(x, right))
    assert torch.equal(x.grad, grad @ right)
    assert torch.equal(right.grad, grad.t() @ x)


ENCODERS = {
    "t": lambda x, weight: x @ weight.t(),
    "T": lambda x, weight: x @ weight.T,
    "mT": lambda x, weight: torch.matmul(x, weight.mT),
    "transpose": lambda x, weight: torch.mm(x, torch.transpose(weight, 0, 1)),
    "permute": lambda x, weight: x @ weight.permute(1, 0),
}


def autoencoder(encode):
    """Of one weight, with the gradients that its author wrote down."""

    class Autoencoder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            hidden = encode(x, weight)
            ctx.save_for_backward(x, hidden, weight)
            return hidden @ weight

        @staticmethod
        def backward(ctx, grad):
            x, hidden, weight = ctx.saved_tensors
            inner = grad @ weight.t()
            return inner @ weight, hidden.t() @ grad + inner.t() @ x

    return Autoencoder


@pytest.mark.parametrize("function", [Both, *map(autoencoder, ENCODERS.values())], ids=["Both", *ENCODERS])
def test_a_formula_of_a_weight_that_is_read_in_two_ways_is_in_full_precision(x, function):
    class Own(Block):
        def forward(self, x):
            return function.apply(x, self.right)

    for variant in (INT8, BFLOAT16):
        model = Own("", None)
        apply_(model, named(right=variant))
        grad = torch.randn(4, 16)
        x.grad = None
        model(x).backward(grad)
        right = model._parameters["right"]
        assert torch.equal(x.grad, grad @ right if function is Both else (grad @ right.t()) @ right)


def test_a_weight_that_a_checkpoint_reads_in_two_ways_is_no_formula(x):
    class Own(Block):
        def forward(self, x):
            function = lambda t: torch.relu(t @ self.right.t()) @ self.right  # noqa: E731
            return function(x) if self.kind is None else self.kind(function, x, [self.right])

    def gradients(kind):
        model = Own("", kind)
        apply_(model, named(right=INT8), seed=5)
        return gradients_of(model, model(x).square().sum())

    assert equal(gradients(diffusion), gradients(None))
