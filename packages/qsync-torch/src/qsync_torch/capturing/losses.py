"""A script's loss function as a job's: what of a batch it takes, what of it the model takes, and what it is given of the output.

Nothing is run to find that out: it is read from names of keys and parameters, and what they do not tell is refused where the loss
runs for the first time.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_torch.failures import first_line, numbered_line
from qsync_torch.job import Batch

Loss = Callable[..., torch.Tensor]

_LABELS = ("labels", "label", "targets", "target")
"""Keys of a batch's dictionary that hold what a loss function of the script's own compares with."""
_WHOLE = ("batch", "inputs", "data", "sample", "samples", "example", "examples", "features")
"""Names of a loss function's parameter that takes a batch's whole dictionary."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@attrs.frozen
class Signature:
    """What a loss function takes.

    Attributes:
        names: of its positional parameters, the output first.
        needed: how many of them have no default.
        takes_more: ``*targets``.
        takes_keys: ``**batch``.
        is_torchs: a loss of PyTorch's, which compares tensors.
    """

    names: tuple[str, ...] = ("output", "target")
    needed: int = 2
    takes_more: bool = False
    takes_keys: bool = False
    is_torchs: bool = True

    @classmethod
    def of(cls, loss_fn: Loss) -> Signature:
        """PyTorch's way where nothing is known, as of some functions that are written in C."""
        function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return cls()
        kinds = {parameter.kind for parameter in parameters}
        names = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
        whole, more = inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL in kinds
        module = (type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn).__module__ or ""
        return cls(names, needed_of(parameters), more, whole, module.startswith("torch."))

    @property
    def takes_whole_batch(self) -> bool:
        """``loss_fn(output, batch)`` and ``loss_fn(output, **batch)``."""
        return self.takes_keys or (len(self.names) > 1 and self.names[1] in _WHOLE)

    def logits_of(self, output: Any) -> Any:
        """The output, or its logits where the loss compares tensors and the model returns more."""
        if isinstance(output, torch.Tensor) or not (self.is_torchs or self.names[:1] == ("logits",)):
            return output
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        return output if logits is None else logits


def needed_of(parameters: Iterable[inspect.Parameter]) -> int:
    """How many positional parameters have no default."""
    return sum(parameter.kind in _POSITIONAL and parameter.default is parameter.empty for parameter in parameters)


def batch_of_mapping(name: str, model: nn.Module, loss_fn: Loss | None, given: dict[str, Any]) -> Batch:
    """What model and loss take of a dictionary.

    ==============================  ==============================================  =============================
    the loss function               the model is called with                        the loss gets
    ==============================  ==============================================  =============================
    None                            all of it                                       nothing, it is the model's own
    ``loss_fn(output)``             the keys its forward takes                      nothing else
    ``loss_fn(output, batch)``,     the keys its forward takes, labels included     all of it
    ``loss_fn(output, **batch)``
    ``loss_fn(output, labels)``,    the keys its forward takes, without labels      the keys that its parameters name;
    and with more parameters                                                        else the labels, or what is left
    ==============================  ==============================================  =============================

    Raises:
        JobError: when the model needs more than that, nothing is left for the loss, or another number of keys than it takes.
    """
    if loss_fn is None:
        return Batch(kwargs=given)
    signature = Signature.of(loss_fn)
    forward = inspect.signature(model.forward)
    parameters = forward.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    taken = [key for key in given if takes_all or any(key == it.name and it.kind is not it.POSITIONAL_ONLY for it in parameters)]
    try:
        forward.bind(**{key: given[key] for key in taken})
    except TypeError as error:
        raise JobError(
            f"the loader of {name} yields a dictionary ({', '.join(given)}), of which the model's forward gets the keys that its "
            f"parameters are called after ({error}); {otherwise(model, 1)}"
        ) from None
    if signature.takes_whole_batch:
        return Batch(kwargs={key: given[key] for key in taken}, target=given)
    if not signature.takes_more and len(signature.names) < 2:
        return Batch(kwargs={key: given[key] for key in taken})
    beside = _beside(name, signature, given, taken)
    named = [key for key in beside if key in signature.names]
    kwargs = {key: given[key] for key in taken if key not in beside or (key in named and key not in _LABELS)}
    return Batch(kwargs=kwargs, target=given[beside[0]] if len(beside) == 1 else tuple(given[key] for key in beside))


def _beside(name: str, signature: Signature, given: Mapping[str, Any], taken: list[str]) -> list[str]:
    """The keys that the loss gets beside the output, in its order."""
    wanted = signature.names[1:]
    count = max(signature.needed - 1, 1)
    if wanted and all(key in given for key in wanted[:count]):  # and of those with a default as many as follow without a gap
        return list(wanted[:count] if signature.is_torchs else itertools.takewhile(given.__contains__, wanted))
    labels = [key for key in _LABELS if key in given]
    left = [key for key in given if key not in taken] or labels
    if not left:
        raise JobError(
            f"the loader of {name} yields a dictionary ({', '.join(given)}) of which the model takes everything, and nothing is "
            f"left for the loss; pass loss_fn=None where the model returns its own loss; {CONVENTIONS}"
        )
    if len(labels) == count and not signature.takes_more:
        return labels
    if len(left) == count or signature.takes_more:
        return left
    raise JobError(
        f"the loader of {name} yields a dictionary of which the model does not take {', '.join(left)}, and the loss takes {count} "
        f"beside the output; {CONVENTIONS}"
    )


CONVENTIONS = (
    "of a dictionary, loss_fn(output, batch) gets all, loss_fn(output, labels) the keys that its parameters are called after, and "
    "loss_fn(output) nothing; call them so, or pass qsync_torch.job.Batch objects as the loader (docs/your-script.md)"
)


def otherwise(model: nn.Module, targets: int) -> str:
    """What to do about batches that are not what the model's forward and the loss take."""
    needed = [it for it in inspect.signature(model.forward).parameters.values() if needed_of([it])]
    parts = [*(it.name for it in needed), *(["target"] if targets == 1 else (f"target{n}" for n in range(targets)))]
    return (
        f"where the training loop makes something else of a batch, pass that as the loader, here lambda: (({', '.join(parts)}) for "
        "... in loader), or qsync_torch.job.Batch objects"
    )


SEVERAL_CALLS = (
    "a loop that calls the model several times a step makes these calls in one module's forward, which is called once "
    "(docs/your-script.md#several-calls-in-a-step)"
)
_OF_PARTS = (
    "of a tuple, the loss gets the model's output and as many of the last parts as it has further parameters, and the model the "
    f"others; {SEVERAL_CALLS}"
)


def loss_of(name: str, loss_fn: Loss | None) -> Callable[[Any, Batch], torch.Tensor]:
    """A job's loss, from a script's."""
    if loss_fn is None:

        def own_loss(output: Any, batch: Batch) -> torch.Tensor:
            return _own_loss(name, output)

        return own_loss
    function, signature = loss_fn, Signature.of(loss_fn)

    def loss(output: Any, batch: Batch) -> torch.Tensor:
        output, target = signature.logits_of(output), batch.target
        targets = target if isinstance(target, tuple) else () if target is None else (target,)
        by_key = isinstance(target, dict) and signature.takes_keys
        otherwise = CONVENTIONS if batch.kwargs else _OF_PARTS
        try:
            found = function(output, **target) if by_key else function(output, *targets)
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # out of memory, values that an export has not
                raise
            raise JobError(_not_for_this(name, error, otherwise, output, *targets)) from error
        if found is None:  # as the loss of a model that was not given the labels
            raise JobError(_not_for_this(name, None, otherwise, output, *targets))
        return found

    return loss


def _not_for_this(name: str, error: Exception | None, otherwise: str, *given: Any) -> str:
    kinds = " and ".join(map(_kind, given))
    if error is None:
        return f"the loss_fn of {name}, called with {kinds}, returned None; {otherwise}"
    line = numbered_line(error)
    return f"the loss_fn of {name}, called with {kinds}, failed{line and f' in {line}'} ({first_line(error)}); {otherwise}"


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _own_loss(name: str, output: Any) -> torch.Tensor:
    """The loss in what a model returns: the output itself, its ``loss``, or its first part that is one number."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = next((part for part in output if isinstance(part, torch.Tensor) and part.dim() == 0), None)
    else:
        found = getattr(output, "loss", output)
    if isinstance(found, torch.Tensor) and found.dim() == 0:
        return found
    raise JobError(
        f"{name} was captured without a loss function, and its model returns no loss (a {type(output).__name__}); pass loss_fn, or "
        "batches with the labels that the model makes its loss from"
    )
