"""Averages of a model whose plan stores weights (``AveragedModel``).

PyTorch pairs an average's parameters with the model's by their order.  What a plan stores is no parameter of the model, and is one
of the average, which is a plain copy: all that come after it would be paired with others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from qsync_core.errors import PlanError
from qsync_torch.apply.plan_fit import STORED


def _paired(update: Callable[[Any, nn.Module], None]) -> Callable[[Any, nn.Module], None]:
    @functools.wraps(update)
    def update_parameters(average: Any, model: nn.Module) -> None:
        """Update the average of all that is no stored weight; that does not change."""
        without: list[tuple[nn.Module, nn.Parameter | None]] = []
        pairs = zip(reversed(list(model.modules())), reversed(list(average.module.modules())), strict=False)  # wrappers are outside
        for part, copied in pairs:
            if STORED in part.__dict__ and part._parameters.get("weight") is None:
                if type(copied).__name__ != type(part).__name__ or STORED in copied.__dict__:
                    raise PlanError(
                        f"{type(average).__name__} averages a model of other modules than this one, whose plan stores "
                        f"{part.__dict__[STORED].fqn}: make the average of this model, after its adapters are added"
                    )
                without.append((copied, copied._parameters["weight"]))
        try:
            for copied, _ in without:
                copied._parameters["weight"] = None
            update(average, model)
        finally:
            for copied, weight in without:
                copied._parameters["weight"] = weight

    return update_parameters


@functools.cache
def pair_averages() -> None:
    """Have averages leave out what plans store; once in a process, when the first weight is stored."""
    AveragedModel.update_parameters = _paired(AveragedModel.update_parameters)  # type: ignore[assignment,method-assign]
