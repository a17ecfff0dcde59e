"""Export of one training step (model and loss), or of its model alone, into an ATen graph, without running it on real data.

``torch.export`` replaces parameters and inputs by fake tensors: nothing is copied or computed, so that a model of any size is
exported in the memory it already has.  Operators carry the module that made them in ``nn_module_stack``.
"""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from typing import Any
from unittest.mock import patch

import attrs
import torch
import torch.utils.checkpoint
from torch.export.graph_signature import InputKind
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode

from qsync_core.errors import JobError, TraceError
from qsync_torch.distributed.alone import Alone
from qsync_torch.failures import first_line, place_in, place_of
from qsync_torch.job import Batch, Job
from qsync_torch.torch_internals import pytree
from qsync_torch.tracing.held_state import held_state
from qsync_torch.tracing.running_loss import RunLoss, check_scalar, map_tensors

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
    """The graph of a training step and what its placeholders are.

    ``loss`` is None where the graph holds the loss, which is then its output; of a loss that was run instead, the graph's outputs
    are those of the model that get a gradient from it.
    """

    program: torch.export.ExportedProgram
    placeholders: dict[str, Placeholder]
    loss: RunLoss | None = None

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The ATen graph."""
        module: torch.fx.GraphModule = self.program.graph_module
        return module


class _Exported(torch.nn.Module):
    """What is exported of a job: something around its model.

    ``recorded`` is the mode that is active meanwhile; it is told where the model's own code runs.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self.recorded = _AsRecorded()

    def run_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward."""
        self.recorded.in_model = True
        try:
            return self.model(*args, **kwargs)
        finally:
            self.recorded.in_model = False


class _Step(_Exported):
    """Model and loss in one module.  The loss is kept in a tuple, so that one which is a module adds no names."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._loss = (job.loss,)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> torch.Tensor:
        return self._loss[0](self.run_model(args, kwargs), Batch(args, kwargs, target))


class _Outputs(_Exported):
    """The model alone: its floating-point outputs, in the order in which they are found.  It takes what :class:`_Step` takes."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        map_tensors(self.run_model(args, kwargs), found.append)
        return found


def export_step(job: Job, batch: Batch) -> ExportedStep:
    """Export the job's forward pass and loss in training mode.

    Raises:
        TraceError: naming the line of the model that cannot be exported, and what to do about it.
    """
    program = _export(job, _Step(job), batch)
    outputs = program.graph.output_node().args[0]
    check_scalar(job.name, [output.meta.get("val") if isinstance(output, torch.fx.Node) else output for output in outputs])
    return ExportedStep(program, _placeholders(job, batch, program))


def export_model(job: Job, batch: Batch) -> ExportedStep:
    """Export the job's forward pass alone, in training mode; the graph's outputs are all floating-point ones of the model.

    Raises:
        TraceError: as :func:`export_step`.
    """
    program = _export(job, _Outputs(job), batch)
    return ExportedStep(program, _placeholders(job, batch, program))


def with_run_loss(step: ExportedStep, loss: RunLoss) -> ExportedStep:
    """The step of an exported model and a loss that was run.  The graph, whose outputs are cut down, is changed in place."""
    output = step.graph_module.graph.output_node()
    found = tuple(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(found[index] for index in loss.outputs),)
    return attrs.evolve(step, loss=loss)


def _export(job: Job, module: _Exported, batch: Batch) -> torch.export.ExportedProgram:
    device = next((parameter.device.type for parameter in job.model.parameters()), "cpu")
    autocast_off = nullcontext() if device == "meta" else torch.autocast(device, enabled=False)  # which knows no device meta
    held = held_state(job.model, job.loss, fakes=job.model.buffers())
    with training(job.model), held, quiet_torch(), autocast_off, _as_in_training(), module.recorded, Alone():
        try:
            return torch.export.export(module, (batch.args, batch.kwargs, batch.target), strict=False)
        except JobError:  # what the job itself refuses is no failure of the export
            raise
        except Exception as error:
            raise TraceError(explain_export_failure(job.name, error)) from error


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


def _without_conversion(method: str) -> Callable[..., Any]:
    """Stands for a method of modules that converts them, which cannot exchange the fake tensors of an export: ``.to(x.dtype)``.

    Raises:
        TypeError: where a parameter or buffer would have another format or device afterwards.
    """

    def convert(module: torch.nn.Module, *args: Any, memory_format: torch.memory_format | None = None, **kwargs: Any) -> Any:
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if not tensor.is_floating_point():  # of which only the device could change, and an export has one
                continue
            with torch.no_grad():
                made = getattr(tensor, method)(*args, **kwargs)
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                formats = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, made.dtype))
                raise TypeError(f"forward converts {name} of a {type(module).__name__} from {' to '.join(formats)}")
        return module

    return convert


def _no_derivative(*_: Any, **__: Any) -> Any:
    """Stands for autograd's functions.

    Raises:
        TypeError: always.
    """
    raise TypeError("forward differentiates with torch.autograd")


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Distributions do not look at their arguments' values, for as long as it takes."""
    default = torch.distributions.Distribution.set_default_validate_args
    validates = True
    try:  # the only way to ask for the default
        torch.distributions.Bernoulli(probs=2.0)
        validates = False
    except ValueError:
        default(False)
    try:
        yield
    finally:
        default(validates)


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Functions of PyTorch's that an export would see otherwise than training does, for as long as it takes.

    Parts that reentrant checkpointing runs are exported with their gradients.  What is saved for backward goes through no hooks:
    those of a checkpoint around another one would end the recording without gradients.  The forward of an ``autograd.Function``
    runs without autograd in any case; a ``torch.no_grad()`` in it would last until the end of the exported graph.  The format of
    what it returns counts as read where it is given weights.  A module's conversion to the formats that it has is none.
    Distributions do not look at their arguments' values.  Differentiable collectives (``torch.distributed.nn``) are not compiled
    here, so that they need no refusal.
    """
    inside = 0
    apply = vars(torch.autograd.Function)["apply"]

    def counted(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside += 1
        try:
            result = apply.__get__(None, cls)(*args, **kwargs)
        finally:
            inside -= 1
        # Its gradient formula multiplies weights with gradients in the format of what it returns.
        if any(isinstance(leaf, torch.nn.Parameter) for leaf in pytree.tree_leaves((args, kwargs))):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    FORMAT_READ(leaf)
        return result

    def outside(method: Callable[..., None]) -> Callable[..., None]:
        def switched(self: Any, *args: Any) -> None:
            if not inside:
                method(self, *args)

        return switched

    replaced: list[tuple[Any, str, Any]] = [
        (torch.utils.checkpoint, "CheckpointFunction", _PlainCheckpoint),
        *((torch.autograd.graph.saved_tensors_hooks, name, lambda self, *_: None) for name in ("__enter__", "__exit__")),
        (torch.autograd.Function, "apply", classmethod(counted)),
        # torch.no_grad calls set_grad_enabled.
        *((torch.enable_grad, name, outside(getattr(torch.enable_grad, name))) for name in ("__enter__", "__exit__")),
        *(
            (torch.set_grad_enabled, name, outside(getattr(torch.set_grad_enabled, name)))
            for name in ("__init__", "__enter__", "__exit__")
        ),
        *((torch.nn.Module, name, _without_conversion(name)) for name in _CONVERSIONS),
        (torch.autograd, "backward", _no_derivative),  # the mode sees it only from PyTorch 2.13 on
    ]
    collectives = sys.modules.get("torch.distributed.nn.functional")
    if hasattr(collectives, "_not_supported_under_compile"):  # from PyTorch 2.13 on
        replaced.append((collectives, "_not_supported_under_compile", lambda name, **suggestion: None))
    with ExitStack() as ending:
        ending.enter_context(_unvalidated())
        for owner, name, stand_in in replaced:
            ending.enter_context(patch.object(owner, name, stand_in))
        yield


class _AsRecorded(TorchFunctionMode):
    """What a forward does besides operators, in a way that an export can record: choices without values, ``.data``, ``.dtype``.

    Choices are those of an ordinary step.  ``x.data`` is ``x.detach()``, and what is assigned to it is written into ``x``.

    Numbers are finite (the encoders of DETR ask that in every layer, some losses ask it of themselves).  A random number of 0..1 is
    on the likelier side of what it is compared with: with LayerDrop (Wav2Vec2, Whisper, BART), no layer is left out.

    Of the reads of a format those of the model's code count, each tensor's once: PyTorch reads the formats of all tensors when it
    writes a graph down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_model = False
        self._formats_read: dict[int, torch.Tensor] = {}
        self._drawn: list[torch.Tensor] = []
        self._asked: list[tuple[torch.Tensor, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DERIVATIVES:
            _no_derivative()
        if func == _GET_DATA:
            return args[0].detach()
        if func == _SET_DATA:
            return _write_data(*args)
        if func == _GET_DTYPE:
            dtype = func(*args, **(kwargs or {}))
            if dtype.is_floating_point and self.in_model and id(args[0]) not in self._formats_read:
                self._formats_read[id(args[0])] = args[0]
                FORMAT_READ(args[0])
            return dtype
        if func in _ORDERS and isinstance(args[1], (int, float)) and any(args[0] is drawn for drawn in self._drawn):
            return torch.tensor((args[1] > 0.5) is _ORDERS[func]).reshape(args[0].shape)
        if func in _OF_ALL and len(args) == 1 and not kwargs:
            for asked, answer in self._asked:
                if args[0] is asked:
                    return torch.tensor(answer)
        if func in _FINITE and args[0].dim() == 0:
            return torch.tensor(_FINITE[func])
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.shape in ((), (1,)):
            self._drawn.append(result)
        elif func in _FINITE:
            self._asked.append((result, _FINITE[func]))
        return result


_LIBRARY = torch.library.Library("qsync", "FRAGMENT")
_LIBRARY.define("format_read(Tensor x) -> ()")
_LIBRARY.impl("format_read", lambda x: None, "CompositeExplicitAutograd")
torch.library.register_fake("qsync::format_read", lambda x: None, lib=_LIBRARY)
FORMAT_READ = torch.ops.qsync.format_read.default
"""Stands in a graph for ``h.dtype``; it does nothing."""
torch.library.register_vmap("qsync::format_read", lambda info, dims, x: (FORMAT_READ(x), None), lib=_LIBRARY)
has_side_effect(FORMAT_READ)  # or else a graph loses it, which nothing reads


def _write_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value``, as an export can record it.

    Raises:
        TypeError: where the tensor would have another shape or format afterwards.
    """
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        was, made = (f"{tuple(x.shape)} in {str(x.dtype).removeprefix('torch.')}" for x in (tensor, value))
        raise TypeError(f"forward gives a tensor of {was} by .data the shape and format {made}")
    with torch.no_grad():
        tensor.copy_(value)


_GET_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CONVERSIONS = ("to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda")
_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
"""However they were imported."""
_ORDERS = {
    **dict.fromkeys((torch.Tensor.__lt__, torch.Tensor.lt, torch.lt, torch.Tensor.__le__, torch.Tensor.le, torch.le), True),
    **dict.fromkeys((torch.Tensor.__gt__, torch.Tensor.gt, torch.gt, torch.Tensor.__ge__, torch.Tensor.ge, torch.ge), False),
}
"""Comparisons, and whether they ask for the smaller one."""
_OF_ALL = (torch.all, torch.any, torch.Tensor.all, torch.Tensor.any)
_FINITE = {
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), True),
    **dict.fromkeys((torch.isnan, torch.Tensor.isnan, torch.isinf, torch.Tensor.isinf), False),
}
"""Questions about numbers, and what an ordinary step answers."""


@contextmanager
def training(model: torch.nn.Module) -> Iterator[None]:
    """Switch on training mode for a model that is wholly in evaluation mode; submodules that the user froze stay as they are."""
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
        "or make the decision outside the model's forward; a loss that is passed as loss_fn may depend on values",
    ),
    (
        r"forward converts",
        "convert the model once, before it is trained, instead of in its forward",
    ),
    (
        r"numpy|\.numpy\(\)",
        "it leaves PyTorch for NumPy: compute with tensors instead, or outside the model's forward, as in a loss that is passed as "
        "loss_fn",
    ),
    (
        r"Invalid input for|unsupported input type|Unsupported.*input|register_dataclass|pytree",
        "torch.export does not know the type of an argument: pass tensors, numbers, or lists, tuples and dictionaries of them",
    ),
    (
        r"forward differentiates",
        "a plan's graph has no derivatives inside a step (forces, a gradient penalty): train such a model without a plan, or "
        "without that term of its loss",
    ),
    (
        r"forward gives a tensor of",
        "give the tensor its shape and format once, before it is trained, instead of in the forward",
    ),
)
"""What to do about a failure whose text matches."""
_OTHER_ADVICE = (
    "see that the model runs on the job's first batch, also where torch.compiler.is_compiling() is true, as it is in an export, "
    "and that its forward uses only PyTorch operations on tensors"
)


def explain_export_failure(model: str, error: BaseException) -> str:
    """Explain in one message: which model, at which file and line, what happened, what to do next."""
    text = f"{type(error).__name__}: {error}"
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, text)), _OTHER_ADVICE)
    return f"{model} cannot be exported{place_of(error)}: {advice} ({first_line(error)})"


def explain_node_failure(model: str, node: torch.fx.Node, error: BaseException) -> str:
    """The same for a node of the exported graph that has no static shape."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n *(.*)', node.meta.get("stack_trace") or "")
    advice, pattern = _ADVICE[0][1], _ADVICE[0][0]
    text = first_line(error)
    # Whatever else fails here had a shape from a value that an export does not have, such as the end of an arange.
    said = text if re.search(pattern, text) else "a shape is made from a number that is read from a tensor"
    return f"{model} cannot be traced{place_in(frames)}: {advice} ({said})"
