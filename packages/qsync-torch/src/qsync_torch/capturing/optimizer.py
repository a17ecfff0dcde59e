"""An optimizer of a script, made again for other parameters: those of the copies that measurements train."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from qsync_core.errors import JobError
from qsync_torch.job import SeveralOptimizers
from qsync_torch.tracing.held_state import held_parameters

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Optimizers = Optimizer | Sequence[Optimizer] | MakeOptimizer
"""What a script may say: its optimizer, those that its loop steps one after the other, or what makes one from parameters."""


def maker_of(name: str, model: nn.Module, optimizer: Optimizers, loss_fn: Any = None) -> MakeOptimizer:
    """What makes a job's optimizer: from the trainable parameters of the model or of a copy of it, in their order.

    An optimizer is made again as it is now: its class, its attributes, its groups with their hyper-parameters, each group with the
    parameters in the same places; without state, without hooks, and without what a learning rate's schedule puts around ``step``.
    Parameters that the loss has of its own (class centres, a temperature) are left out, which a warning says.

    Args:
        model: whose parameters the optimizer has.
        optimizer: one, or several, or a function from parameters to one, which is taken as it is.

    Raises:
        JobError: when it is none of these, has parameters that are not the model's or none that are, or cannot be made again.
    """
    several: Sequence[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not (several and all(isinstance(one, Optimizer) for one in several)):
        if not callable(optimizer):
            raise JobError(
                f"the optimizer of {name} is a {type(optimizer).__name__}; pass the torch.optim.Optimizer of the script, a list of "
                "those that it has, or a function that makes one from the parameters"
            )
        return optimizer
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_model = {id(parameter) for parameter in trainable}
    of_loss = {id(parameter) for parameter in held_parameters(loss_fn)} - of_model
    makers = [_maker_of_one(name, trainable, one, of_loss) for one in several if len(several) == 1 or not _steps_only(one, of_loss)]
    stepped = {id(parameter) for one in several for group in one.param_groups for parameter in group["params"]}
    if left := sum(id(parameter) not in stepped for parameter in trainable):
        warnings.warn(
            f"{left} of the {len(trainable)} trainable parameters of {name} are not the optimizer's, and the plan knows of no step "
            "that changes them; where the loop steps several optimizers, pass all of them, [first, second]",
            stacklevel=4,
        )
    if left := len(stepped & of_loss):
        warnings.warn(
            f"{left} parameter{'s' * (left > 1)} of the optimizer of {name} {'are' if left > 1 else 'is'} the loss's: predicted "
            "steps and memory leave out that these are stepped, and measurements train with them as they are",
            stacklevel=4,
        )
    if len(makers) == 1:
        return makers[0]

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        return SeveralOptimizers([maker(given) for maker in makers])

    return make


def _steps_only(optimizer: Optimizer, parameters: set[int]) -> bool:
    """Whether it steps some of these and no others."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return bool(stepped) and stepped <= parameters


def _maker_of_one(name: str, trainable: list[nn.Parameter], optimizer: Optimizer, of_loss: set[int]) -> MakeOptimizer:
    place = {id(parameter): index for index, parameter in enumerate(trainable)}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if id(p) not in place and id(p) not in of_loss and p.requires_grad]
        if strange:
            raise JobError(
                f"group {number} of the optimizer of {name} has a parameter of shape {list(strange[0].shape)} that is not one "
                "of the model's or the loss's; pass the module that holds all that is trained, and an optimizer that was made "
                "after the model had its parameters"
            )
        groups.append([place[id(p)] for p in group["params"] if id(p) in place])
    if not any(groups):
        raise JobError(f"the optimizer of {name} has no parameter of the model that is trained; pass the one that steps it")

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return _again(optimizer, trainable, list(parameters), groups)

    try:
        make(trainable)
    except Exception as error:
        raise JobError(
            f"the {type(optimizer).__name__} of {name} cannot be made again for a copy of the model ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}); pass a function that makes it from parameters instead, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        ) from error
    return make


def _again(
    optimizer: Optimizer, trainable: list[nn.Parameter], parameters: list[nn.Parameter], groups: list[list[int]]
) -> Optimizer:
    """The optimizer on other parameters, which stand in the same order."""
    if [p.shape for p in parameters] != [p.shape for p in trainable]:
        raise ValueError(
            f"the optimizer was captured with {len(trainable)} parameters, and is to be made for {len(parameters)} of other shapes"
        )
    # Whatever else holds a parameter, as LBFGS does, gets the new one in its place.
    memo: dict[int, Any] = {id(old): new for old, new in zip(trainable, parameters, strict=True)}
    memo[id(optimizer.state)] = defaultdict(dict)
    memo[id(optimizer.param_groups)] = [
        {"params": [parameters[place] for place in places]}
        | {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        for group, places in zip(optimizer.param_groups, groups, strict=True)
    ]
    kept = {key: value for key, value in vars(optimizer).items() if not key.endswith("_hooks") and not _shadows(optimizer, key)}
    made = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = made
    made.__setstate__(copy.deepcopy(kept, memo))
    return made


def _shadows(optimizer: Optimizer, key: str) -> bool:
    """Whether an attribute stands before a method of the class, as what a learning rate's schedule puts around ``step``."""
    return callable(getattr(type(optimizer), key, None))
