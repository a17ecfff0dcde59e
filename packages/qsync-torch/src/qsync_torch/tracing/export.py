"""Export of one training step (model and loss) into an ATen graph, without running it on real data.

``torch.export`` replaces parameters and inputs by fake tensors: nothing is copied or computed, so that a model of any size is
exported in the memory it already has.  Operators carry the module that made them in ``nn_module_stack``.
"""

from __future__ import annotations

import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import attrs
import torch
import torch.utils.checkpoint
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qsync_core.errors import JobError, TraceError
from qsync_torch.distributed.alone import Alone
from qsync_torch.failures import first_line, place_in, place_of
from qsync_torch.job import Batch, Job

MODEL_PREFIX = "model"
"""Attribute of the exported wrapper that holds the user's model; stripped from every name."""


@attrs.frozen
class Placeholder:
    """What a placeholder of the exported graph stands for.

    ``kind`` is ``parameter``, ``buffer``, ``constant`` or ``input``; ``name`` is the FQN of a parameter (its first name in
    ``named_parameters``, so that tied weights have one), the FQN of a buffer, or the name of the argument.
    """

    kind: str
    name: str


@attrs.frozen(eq=False)
class ExportedStep:
    """The graph of a training step and what its placeholders are."""

    program: torch.export.ExportedProgram
    placeholders: dict[str, Placeholder]

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The ATen graph; its output is the loss."""
        module: torch.fx.GraphModule = self.program.graph_module
        return module


class _Step(torch.nn.Module):
    """Model and loss in one module.  The loss is kept in a tuple, so that one which is a module adds no names."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self._loss = (job.loss,)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> torch.Tensor:
        return self._loss[0](self.model(*args, **kwargs), Batch(args, kwargs, target))


def export_step(job: Job, batch: Batch) -> ExportedStep:
    """Export the job's forward pass and loss in training mode.

    Raises:
        TraceError: naming the line of the model that cannot be exported, and what to do about it.
    """
    device = next((parameter.device.type for parameter in job.model.parameters()), "cpu")
    with _training(job.model), quiet_torch(), torch.autocast(device, enabled=False), _as_in_training(), _CertainChoices(), Alone():
        try:
            program = torch.export.export(_Step(job), (batch.args, batch.kwargs, batch.target), strict=False)
        except JobError:  # what the job itself refuses is no failure of the export
            raise
        except Exception as error:
            raise TraceError(explain_export_failure(job.name, error)) from error
    _check_loss(job.name, program)
    return ExportedStep(program, _placeholders(job, batch, program))


def _check_loss(name: str, program: torch.export.ExportedProgram) -> None:
    outputs = program.graph.output_node().args[0]
    values = [output.meta.get("val") if isinstance(output, torch.fx.Node) else output for output in outputs]
    if len(values) == 1 and isinstance(values[0], torch.Tensor) and values[0].dim() == 0:
        return
    found = ", ".join(map(_what, values)) or "nothing"
    raise TraceError(f"the loss of {name} must be one scalar tensor, got {found}; reduce it with .mean() or .sum()")


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else "a Python number"


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Silences torch's warnings and log lines: what matters in them is in the error that we raise."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class _PlainCheckpoint:
    """Stands for ``torch.utils.checkpoint.CheckpointFunction`` (``use_reentrant=True``), whose forward runs without autograd.

    Like it, it gives no gradients where none of the arguments requires one.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function."""
        needs = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*args)


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Parts that reentrant checkpointing runs are exported with their gradients."""
    original = torch.utils.checkpoint.CheckpointFunction
    vars(torch.utils.checkpoint)["CheckpointFunction"] = _PlainCheckpoint
    try:
        yield
    finally:
        vars(torch.utils.checkpoint)["CheckpointFunction"] = original


class _CertainChoices(TorchFunctionMode):
    """A random number of 0..1 is never below 0 and always below 1: with p = 0, ``if torch.rand([]) < p: skip`` needs no value.

    transformers' models with LayerDrop (Whisper, BART) ask so in every layer, whatever p is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_comparison = func in (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt) and isinstance(args[1], (int, float))
        if is_comparison and not 0 < args[1] < 1 and any(args[0] is drawn for drawn in self._drawn):
            return torch.tensor(args[1] >= 1)
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self._drawn.append(result)
        return result


@contextmanager
def _training(model: torch.nn.Module) -> Iterator[None]:
    """Training mode for a model that is wholly in evaluation mode; submodules that the user froze stay as they are."""
    modes = {module: module.training for module in model.modules()}
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _placeholders(job: Job, batch: Batch, program: torch.export.ExportedProgram) -> dict[str, Placeholder]:
    first_name = {id(parameter): name for name, parameter in job.model.named_parameters()}
    by_name = dict(job.model.named_parameters(remove_duplicate=False))
    arguments = iter(_argument_names(job.model, batch))
    placeholders: dict[str, Placeholder] = {}
    for spec in program.graph_signature.input_specs:
        name = (spec.target or "").removeprefix(MODEL_PREFIX + ".")
        match spec.kind:
            case InputKind.PARAMETER:
                placeholders[spec.arg.name] = Placeholder("parameter", first_name[id(by_name[name])])
            case InputKind.BUFFER:
                placeholders[spec.arg.name] = Placeholder("buffer", name)
            case InputKind.USER_INPUT:
                placeholders[spec.arg.name] = Placeholder("input", next(arguments))
            case _:
                placeholders[spec.arg.name] = Placeholder("constant", name)
    return placeholders


def _argument_names(model: torch.nn.Module, batch: Batch) -> list[str]:
    """Names of the leaves of (args, kwargs, target) in the order in which export flattens them."""
    positional = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = []
    for path, _ in pytree.tree_leaves_with_path((batch.args, batch.kwargs, batch.target)):
        root, *keys = [_key_text(key) for key in path]
        if root == "0" and keys and int(keys[0]) < len(positional):
            keys[0] = positional[int(keys[0])]
        elif root == "0":
            keys.insert(0, "args")
        elif root == "2":
            keys.insert(0, "target")
        names.append(".".join(keys))
    return names


def _key_text(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)))


_ADVICE = (
    (
        r"data.dependent|Data.dependent|GuardOnDataDependent|unbacked|\.item\(\)|_local_scalar_dense|nonzero|DynamicOutputShape",
        "its control flow or shapes depend on tensor values: choose between values with torch.where, or use torch.cond, "
        "or make the decision outside the model's forward",
    ),
    (
        r"numpy|\.numpy\(\)",
        "it leaves PyTorch for NumPy: compute with tensors instead",
    ),
    (
        r"Invalid input for|unsupported input type|Unsupported.*input|register_dataclass|pytree",
        "torch.export does not know the type of an argument: pass tensors, numbers, or lists, tuples and dictionaries of them",
    ),
)
"""What to do about a failure whose text matches."""
_OTHER_ADVICE = "see that the model runs on the job's first batch, and that its forward uses only PyTorch operations on tensors"


def explain_export_failure(model: str, error: BaseException) -> str:
    """One message: which model, at which file and line, what happened, what to do next."""
    text = f"{type(error).__name__}: {error}"
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, text)), _OTHER_ADVICE)
    return f"{model} cannot be exported{place_of(error)}: {advice} ({first_line(error)})"


def explain_node_failure(model: str, node: torch.fx.Node, error: BaseException) -> str:
    """The same for a node of the exported graph that has no static shape."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n *(.*)', node.meta.get("stack_trace") or "")
    return f"{model} cannot be traced{place_in(frames)}: {_ADVICE[0][1]} ({first_line(error)})"
