"""What operators are called: by the module whose forward they are, else by their weight (docs/artifacts.md#names-of-operators).

Tracing names operators with it, and ``apply_`` finds them by these names. A weight is an identity that stays: it does not depend
on how often, in what order or from where a model calls ``F.linear``, nor on whether a module is called or its ``forward`` is.
"""

from __future__ import annotations

from torch import nn

from qsync_torch.kinds.table import kind_of_module


class Addresses:
    """The names of a model's weights as operators.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = {id(parameter): name for name, parameter in model.named_parameters()}
        self._model = model

    def of(self, weight: nn.Parameter) -> str:
        """The FQN of the module whose own forward is the operator of this weight, else that of the parameter.

        Raises:
            KeyError: when the model has no such parameter.
        """
        name = self._name[id(weight)]
        owner, _, leaf = name.rpartition(".")
        own = owner and leaf == "weight" and kind_of_module(self._model.get_submodule(owner)) is not None
        return owner if own else name
