"""Custom operators are called straight in plain eager mode; dispatch modes, fake tensors and subclasses still see them."""

from typing import ClassVar

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch import apply_
from qsync_torch.kernels import library_ops
from qsync_torch.kernels.binding import quantization_of
from qsync_torch.kernels.library_ops import is_plain, quantize

from .small_models import INT8, ConvNet, images, named

PER_CHANNEL = quantization_of(Precision.INT8, Granularity.PER_CHANNEL, Rounding.STOCHASTIC)


class Seen(TorchDispatchMode):
    """Remembers which custom operators reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qsync":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that handles operators itself, by unwrapping."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.overloadpacket.__name__)
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_which_calls_skip_the_dispatcher():
    x = torch.ones(2)
    assert is_plain(x)
    assert is_plain(nn.Parameter(x))
    assert not is_plain(Wrapped(x))
    with Seen():
        assert not is_plain(x)
    with FakeTensorMode():
        assert not is_plain(x)


def test_kernels_get_numbers_whose_sign_is_not_still_to_be_changed(monkeypatch):
    """Kernels on a GPU read memory."""
    z, seen, allocate = torch.randn(3, 4, dtype=torch.complex64), [], library_ops._quantized
    monkeypatch.setattr(library_ops, "_quantized", lambda x, *rest: seen.append(x.is_neg()) or allocate(x, *rest))
    assert z.conj().imag.is_neg()
    found, expected = (quantize(x, PER_CHANNEL, 1, 3) for x in (z.conj().imag, -z.imag))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert seen == [False, False]


def test_a_dispatch_mode_sees_every_operator_of_a_step_and_changes_no_bit():
    model, x = ConvNet(), images()
    applied = apply_(model, named(conv1=INT8, conv2=INT8, fc=INT8))

    def step():
        applied.step = 0
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad for parameter in model.parameters())]

    expected = step()
    with Seen() as seen:
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    of_each = {f"{kind}_{part}" for kind in ("convolution", "linear") for part in ("output", "grad_input", "grad_weight")}
    assert seen.names == {"quantize", *of_each}
