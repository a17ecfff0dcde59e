"""What operators are called: by the module whose forward they are, else by their weight (docs/artifacts.md#names-of-operators).

Tracing names operators with it and ``apply_`` finds them with it.  A weight is an identity that stays: it does not depend on how
often, in what order or from where a model calls ``F.linear``, nor on whether a module is called or its ``forward`` is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

LINEAR = "linear"
CONV2D = "conv2d"


def kind_of_forward(module: nn.Module | None) -> str:
    """``linear`` or ``conv2d`` for a module that runs the forward of ``nn.Linear`` or ``nn.Conv2d``; empty for others.

    A subclass that keeps the forward counts, also one with a computed weight (a parametrization).  One with a forward of its own,
    of its class or patched on the instance, calls functions.
    """
    if module is None or not has_class_forward(module):
        return ""
    if isinstance(module, nn.Linear) and _is_torchs(type(module).forward):
        return LINEAR
    if isinstance(module, nn.Conv2d) and _is_torchs(type(module).forward) and "_conv_forward" not in module.__dict__:
        return CONV2D if _is_torchs(type(module)._conv_forward) else ""
    return ""


def _is_torchs(function: Any) -> bool:
    """Whether a method is what PyTorch has under that name; classes are patched too (``nn.Linear.forward = ...``)."""
    return getattr(function, "__code__", None) in _TORCHS


_TORCHS = frozenset(
    code
    for code in (f.__code__ for f in (nn.Linear.forward, nn.Conv2d.forward, nn.Conv2d._conv_forward))
    if code.co_filename.replace("\\", "/").rpartition("torch/nn/modules/")[2] in ("linear.py", "conv.py")
)
"""The code of the methods that a plan replaces; those that were patched before QSync was imported are not among them."""


def has_class_forward(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class."""
    patched = module.__dict__.get("forward")
    return patched is None or getattr(patched, "__func__", None) is type(module).forward


class Addresses:
    """The names of a model's weights as operators.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = {id(parameter): name for name, parameter in model.named_parameters()}
        self._model = model

    def of(self, weight: nn.Parameter, kind: str) -> str:
        """The FQN of the linear or convolution module that runs with this weight, else that of the parameter.

        Raises:
            KeyError: when the model has no such parameter.
        """
        name = self._name[id(weight)]
        owner, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(owner)
        return owner if leaf == "weight" and owner and kind_of_forward(module) == kind else name
