"""What a kind of operators is: the functions and modules of PyTorch that call it, and how their arguments are to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from qsync_core.geometry import Geometry
from qsync_core.kinds import Kind

Settings = tuple[Any, ...]
"""Arguments of a kind's function behind the bias: stride, padding, dilation, groups."""


@attrs.frozen
class Spelling:
    """A function of PyTorch that a kind's products are written with.

    Attributes:
        place, name: of the weight among its arguments, by position and by keyword.
        read: activation, bias and settings of a call, from its arguments and the weight; None where it is more than the product.
        transposed: it takes a matrix (K, N), where the kind's own function takes (N, K).
    """

    place: int
    name: str
    read: Callable[[tuple[Any, ...], Mapping[str, Any], torch.Tensor], tuple[Any, Any, Settings] | None]
    transposed: bool = False


@attrs.frozen
class Operands:
    """Names of the arguments of an ATen operator that are activation, weight and bias (empty: it has none)."""

    x: str = "input"
    weight: str = "weight"
    bias: str = "bias"
    transposed: bool = False


@attrs.frozen
class TracedCall:
    """A call as a trace has it.

    Attributes:
        x, weight, bias: fake tensors; the weight as the function takes it.
        arguments: all arguments by name, defaults included.
        module: whose forward makes the call.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    arguments: Mapping[str, Any]
    module: nn.Module | None = None


@attrs.frozen(eq=False)
class OperatorKind:
    """A kind of operators, with what PyTorch calls them and what a plan computes in their place.

    Attributes:
        row: what core's table says of it.
        function: PyTorch's, of activation, weight, bias and settings.
        module: the class whose forward calls it with its own weight.
        methods: of that class, by whose code its forward is known.
        settings: names of the function's arguments behind the bias, in that order, as its module has them too, with the defaults.
        spellings: functions that it is written with.
        aten: operators of ATen that a trace shows it as, by plain name.
        prepare: the activation (padded where no geometry says it) and the geometry of a call; None where there are no settings.
        of_module: input and settings of a module's call, from the module and the arguments of its forward.
        describe: attributes that a graph stores of a call, and why no plan can change it (or an empty text).
    """

    row: Kind
    function: Callable[..., torch.Tensor]
    module: type[nn.Module]
    methods: tuple[str, ...]
    settings: Mapping[str, int]
    spellings: Mapping[Any, Spelling]
    aten: Mapping[str, Operands]
    prepare: Callable[[torch.Tensor, torch.Tensor, Settings], tuple[torch.Tensor, Geometry]] | None
    of_module: Callable[..., tuple[torch.Tensor, Settings]] | None
    describe: Callable[[TracedCall], tuple[dict[str, str], str]]

    @property
    def name(self) -> str:
        """ATen's plain name of its function, as graphs store it."""
        return self.row.name

    @property
    def weight_dimensions(self) -> int:
        """Dimensions of its weight."""
        return self.row.dimensions + 2

    @property
    def defaults(self) -> Settings:
        """The settings of a call that gives none."""
        return tuple(self.settings.values())

    def call(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry) -> torch.Tensor:
        """Call the kind's function with the settings that a geometry says and a weight as PyTorch stores it."""
        return self.function(x, weight, bias, *(_setting(geometry, name) for name in self.settings))


def _setting(geometry: Geometry, name: str) -> Any:
    value = getattr(geometry, name)
    return (0,) * geometry.dimensions if value == () else value
