"""``saved_tensors_hooks`` that keep what autograd saves in another format, around models under a plan."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, named
from .test_own_checkpoints import Block, gradients_of, x  # noqa: F401


def narrow(tensor):
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def wide(dtype):
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


EXACT = lambda tensor: (tensor.dtype, narrow(tensor)), lambda packed: packed[1].to(packed[0])
KINDS = {"as float32": wide(torch.float32), "as float64": wide(torch.float64)}
VARIANTS = {"int8": Variant.of(Precision.INT8), "int8>float32": INT8}


@pytest.mark.parametrize("how", ["modules", "functions"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("unpack", KINDS.values(), ids=KINDS)
def test_operators_in_8_bit_take_what_hooks_kept_in_16(x, unpack, variant, how):  # noqa: F811
    def gradients(pack, unpack):
        model = Block(how, None)
        apply_(model, named(a=variant, b=variant, right=variant), seed=5)
        with saved_tensors_hooks(pack, unpack):
            y = model(x).double().square().sum()
        return gradients_of(model, y)

    exact = gradients(lambda tensor: tensor, lambda packed: packed)
    for found, expected in zip(gradients(narrow, unpack), exact, strict=True):
        assert found is expected is None or (found - expected).norm() < 0.02 * expected.norm()


def test_hooks_that_give_another_format_back_fail_as_without_a_plan(x):  # noqa: F811
    for variants in ({}, named(a=BFLOAT16)):
        model = Block("modules", None)
        if variants:
            apply_(model, variants)
        with saved_tensors_hooks(narrow, lambda tensor: tensor):
            y = model(x)
        with pytest.raises(RuntimeError, match="dtype"):
            y.sum().backward()
