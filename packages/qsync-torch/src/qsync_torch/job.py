"""A job: what is trained.  A model, its batches, its loss and its optimizer, by name or from a person's own file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from qsync_core.errors import JobError, QSyncError

DEFAULT_BATCH_SIZE = 8
"""Batch size of a job whose author gave none."""


@attrs.frozen(eq=False)
class Batch:
    """One batch: what the model is called with, and what the loss compares with.

    Attributes:
        args, kwargs: the model's positional and keyword arguments; dimension 0 of their tensors is the batch.
        target: anything the loss needs besides the model's output (labels, a tuple of labels); None where the model itself
            is given the labels.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = attrs.field(factory=dict)
    target: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch, in the order args, kwargs, target."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs, self.target)) if isinstance(leaf, torch.Tensor)]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Samples in it: dimension 0 of its first tensor that has dimensions, 1 where there is none."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.dim()), 1)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on ``device`` (memory formats are kept)."""

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs, target = pytree.tree_map(move, (self.args, self.kwargs, self.target))
        return Batch(args, kwargs, target)


@attrs.frozen(eq=False)
class Job:
    """What is trained.

    Attributes:
        name: for people; artifacts store it as the model's name.
        model: the module; parameters may be on any device and are not copied.
        batch: makes the batch of a step on the CPU: ``batch(step, batch_size)``; the same arguments give the same batch.  Whatever
            it raises becomes a JobError, as do other arguments (at once) and a result that is not a :class:`Batch`.
        loss: ``loss(model_output, batch)``, a scalar tensor.
        optimizer: makes the optimizer from the parameters.
        batch_size: samples a rank gets per step.
    """

    name: str
    model: torch.nn.Module
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    batch_size: int = attrs.field(default=DEFAULT_BATCH_SIZE, validator=attrs.validators.ge(1))

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "batch", _checked_batch(self.batch, self.name))

    def compute_loss(self, batch: Batch, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Forward pass and loss of one batch; ``model`` stands in for the job's own (a DDP wrapper, a copy)."""
        output = (self.model if model is None else model)(*batch.args, **batch.kwargs)
        return self.loss(output, batch)

    def batches(self, steps: int, *, start: int = 0, batch_size: int | None = None) -> Iterator[Batch]:
        """The batches of ``steps`` steps, from step ``start`` on."""
        for step in range(start, start + steps):
            yield self.batch(step, batch_size or self.batch_size)


def _checked_batch(make: Callable[[int, int], Batch], name: str) -> Callable[[int, int], Batch]:
    """The batch function, with its failures told apart from QSync's own."""
    if hasattr(make, "checked_by_qsync"):
        return make
    _check_batch_arguments(make, name)

    @functools.wraps(make)
    def batch(step: int, batch_size: int) -> Batch:
        try:
            made = make(step, batch_size)
        except QSyncError:
            raise
        except Exception as error:
            raise JobError(
                f"the batch function of {name} failed at step {step} with batch size {batch_size}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Batch):
            raise JobError(f"the batch function of {name} must return a qsync_torch.job.Batch, got {type(made).__name__}")
        return made

    batch.checked_by_qsync = True  # type: ignore[attr-defined]
    return batch


def _check_batch_arguments(make: Callable[[int, int], Batch], name: str) -> None:
    """Refuse a batch function that can not be called as it will be, before anything is traced or measured.

    Raises:
        JobError: with the arguments that it has, and those that it is called with.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # nothing is known of some callables that are written in C
        return
    try:
        signature.bind(0, DEFAULT_BATCH_SIZE)
    except TypeError:
        raise JobError(
            f"the batch function of {name} has the arguments {signature}; it is called as batch(step, batch_size) "
            "and must return a qsync_torch.job.Batch"
        ) from None


def load_job(text: str, batch_size: int | None = None) -> Job:
    """The job a person names.

    Args:
        text: a named model with options, ``resnet50`` or ``bert-base:seq=384,layers=2`` (see :mod:`qsync_torch.models`); or
            ``path/to/file.py:function`` or ``package.module:function``, a function without required arguments that returns a
            :class:`Job`, or the tuple ``(model, batch, loss, optimizer)`` of its fields.  Options after a second colon are
            passed to the function as keyword arguments.
        batch_size: overrides the job's own.

    Raises:
        JobError: naming what is wrong: an unknown name or option, a file that is not there, a function that fails or
            returns something else.
    """
    from qsync_torch.models import NAMED

    head, _, rest = text.partition(":")
    by_spelling = {name.replace("_", "-"): name for name in NAMED}  # vgg16_bn, as in torchvision, and vgg16-bn are the same
    name = by_spelling.get(head.replace("_", "-"))
    if name is not None:
        job = _call_with_options(NAMED[name], rest, f"the model {name!r}")
    elif rest:
        # A drive letter or a path may hold colons: the last part without '=' is the function.
        target, options = text, ""
        if "=" in text.rpartition(":")[2]:
            target, _, options = text.rpartition(":")
        location, _, function_name = target.rpartition(":")
        if not location:
            raise JobError(f"no function in {text!r}; write 'file.py:function' or 'package.module:function'")
        job = _from_function(location, function_name, options)
    else:
        known = ", ".join(NAMED)
        raise JobError(f"no model is named {text!r}; known are {known}, or write 'file.py:function' for your own")
    return job if batch_size is None else attrs.evolve(job, batch_size=batch_size)


def _from_function(location: str, function_name: str, options: str) -> Job:
    where = f"{location}:{function_name}"
    function = getattr(_import(location), function_name, None)
    if not callable(function):
        raise JobError(f"{location} has no function {function_name!r}")
    made = _call_with_options(function, options, where)
    if isinstance(made, Job):
        return made
    if isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], torch.nn.Module) and all(map(callable, made[1:])):
        return Job(function_name, *made)
    raise JobError(
        f"{where} must return a Job or the tuple (model, batch, loss, optimizer) of a torch.nn.Module and three callables, "
        f"got {_describe(made)}"
    )


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(part).__name__ for part in value) + ")"
    return type(value).__name__


def _import(location: str) -> ModuleType:
    path = Path(location)
    try:
        if path.suffix != ".py":
            return importlib.import_module(location)
        if not path.is_file():
            raise JobError(f"there is no file {location!r}")
        name = f"qsync_job_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and the like look their module up by name
        sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does, so that it finds its neighbours
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.resolve().parent))
        return module
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"importing {location} failed: {type(error).__name__}: {error}") from error


def _call_with_options(function: Callable[..., Any], options: str, what: str) -> Any:
    parameters = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, separator, text = part.partition("=")
        if not separator or key not in parameters:
            raise JobError(
                f"{what} has no option {part!r}; options are written key=value, known keys: {', '.join(parameters) or 'none'}"
            )
        values[key] = _parse_option(text, parameters[key].default, f"option {key} of {what}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [name for name in missing if name not in values]
    if missing:
        raise JobError(f"{what} needs a value for {', '.join(missing)}; give it as an option, key=value")
    try:
        return function(**values)
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"{what} failed: {type(error).__name__}: {error}") from error


def _parse_option(text: str, default: Any, what: str) -> Any:
    if isinstance(default, bool):
        try:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        except KeyError:
            raise JobError(f"{what} is true or false, got {text!r}") from None
    for kind in (int, float):
        if isinstance(default, kind):
            try:
                return kind(text)
            except ValueError:
                raise JobError(f"{what} is {'an integer' if kind is int else 'a number'}, got {text!r}") from None
    return text
