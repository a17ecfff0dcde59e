"""``saved_tensors_hooks`` that keep what autograd saves in another format, around models under a plan."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_

from .small_models import BFLOAT16, FLOAT32, INT8, named
from .test_own_checkpoints import Block, equal, gradients_of, x  # noqa: F401


def narrow(tensor):
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def wide(dtype):
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


EXACT = lambda tensor: (tensor.dtype, narrow(tensor)), lambda packed: packed[1].to(packed[0])
KINDS = {"as kept": lambda tensor: tensor, "as float32": wide(torch.float32), "as float64": wide(torch.float64)}
VARIANTS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": Variant.of(Precision.INT8), "int8>float32": INT8}


@pytest.mark.parametrize("how", ["modules", "functions"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("unpack", KINDS.values(), ids=KINDS)
def test_what_hooks_kept_comes_back_in_the_format_that_the_plan_saved(x, unpack, variant, how):  # noqa: F811
    def gradients(pack, unpack):
        model = Block(how, None)
        apply_(model, named(a=variant, b=variant, right=variant), seed=5)
        with saved_tensors_hooks(pack, unpack):
            y = model(x).square().sum()
        return gradients_of(model, y)

    assert equal(gradients(narrow, unpack), gradients(*EXACT))


def test_hooks_outside_of_forwards_are_as_pytorch_has_them(x):  # noqa: F811
    apply_(Block("modules", None), named(a=INT8))
    plain = Block("modules", None)
    with saved_tensors_hooks(narrow, KINDS["as kept"]):
        y = plain(x)
    with pytest.raises(RuntimeError, match="same dtype"):
        y.sum().backward()
