"""The weights of a checkpoint in safetensors files, put into a model whose parameters are on the meta device, one at a time."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch.apply.plan_fit import STORED
from qsync_torch.apply.stored_modules import HeldWeight, Sum, sum_of

_INDEX = "model.safetensors.index.json"
_CHECKPOINTED = "_checkpoint_wrapped_module."
"""What ``checkpoint_wrapper`` puts into names of modules, and takes out of those of a ``state_dict()``."""
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen(eq=False)
class Checkpoint:
    """Where a model's weights are, and where they are to be.

    Attributes:
        path: a safetensors file, a folder with one or several, or their index.
        device: of the model.
        rename: the name of a parameter in the checkpoint, from that in the model; by default the same, without what PEFT's
            adapters put into it (``base_model.model.`` and ``.base_layer``) and what PyTorch's ``checkpoint_wrapper`` does.
    """

    path: str | os.PathLike[str]
    device: torch.device | str = "cpu"
    rename: Callable[[str], str] | None = None

    def check(self, model: nn.Module) -> None:
        """See that the files have what the model waits for, and warn of what the model has no place for.

        Raises:
            PlanError: naming what is missing.
        """
        where = _files_of(Path(self.path))
        there = self._names_there(model, where)
        waiting = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
        if waiting := [name for name in waiting if there[name] not in where]:
            raise PlanError(
                f"buffer {waiting[0]} of this {type(model).__name__} is on the meta device and {self.path} does not hold it: build "
                "the model so that its buffers have values (accelerate.init_empty_weights() does)"
            )
        missing = [name for name, p in model.named_parameters() if p.device.type == "meta" and there[name] not in where]
        if missing:
            trained = [name for name in missing if model.get_parameter(name).requires_grad]
            others = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
            advice = "name the model's own checkpoint, or say by rename= what its weights are called there"
            if _is_tied_head(model, model.get_parameter(missing[0])):
                advice = "the model ties it to its embedding, which init_empty_weights undoes: call model.tie_weights() after that"
            elif trained:
                advice = (
                    "what is trained anew, as adapters are, needs values before; PEFT makes adapters on the meta device where the "
                    "base is there (docs/frozen-weights.md#a-model-that-does-not-fit gives them some)"
                )
            raise PlanError(
                f"{self.path} holds no {there[missing[0]]}, which {missing[0]} of this {type(model).__name__} waits for{others}: "
                f"{advice}"
            )
        known = {_as_saved(name) for names in _names_of_tensors(model) for name in names} if self.rename is None else set(where)
        if unread := [name for name in where if name not in known]:
            others = f" and {len(unread) - 1} others" if len(unread) > 1 else ""
            warnings.warn(
                f"{self.path} holds {unread[0]}{others}, which this {type(model).__name__} has no place for, as the checkpoint of "
                "a model with more layers does: left out",
                stacklevel=4,
            )

    def load(self, model: nn.Module, compared: Collection[str] = ()) -> dict[str, Sum]:
        """Put the weights into the model, on its device; those that a plan in force stores straight into their formats.

        Args:
            compared: weights of which ranks are to see that theirs are the same.

        Returns:
            Checksums of these, by name; none of what had values before.

        Raises:
            PlanError: when a file cannot be read, or holds a weight of another shape or in a format that is no float of 16 or 32
                bits.
        """
        with _Files() as files:
            where = _files_of(Path(self.path))
            there = self._names_there(model, where)
            loading = _Loading(where, files, torch.device(self.device), there, frozenset(compared))
            for prefix, module in model.named_modules():
                loading.fill(module, f"{prefix}." if prefix else "")
        return loading.sums

    def _names_there(self, model: nn.Module, where: Collection[str]) -> dict[str, str]:
        """What the checkpoint calls each tensor of the model: of tied ones it has one name, which may be any of theirs."""
        rename, found = self.rename or _as_saved, {}
        for first, *others in _names_of_tensors(model):
            found[first] = rename(first)
            if found[first] not in where:
                found[first] = next((there for name in others if (there := rename(name)) in where), found[first])
        return found


@attrs.define(eq=False)
class _Loading:
    """One pass over a model.

    ``loaded`` are tensors that several modules may hold, by the identity of those on the meta device, which are ``kept`` so that no
    other gets it.
    """

    where: Mapping[str, Path]
    files: _Files
    device: torch.device
    there: Mapping[str, str]
    compared: frozenset[str]
    sums: dict[str, Sum] = attrs.field(factory=dict)
    loaded: dict[int, torch.Tensor] = attrs.field(factory=dict)
    kept: list[torch.Tensor] = attrs.field(factory=list)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load what a module itself holds."""
        held: HeldWeight | None = module.__dict__.get(STORED)
        if held is not None:
            if held.device.type == "meta":
                held.write(self._read(f"{prefix}weight", held.shape, held.dtype), self.device)
                name = self.there[f"{prefix}weight"]
                file = self.where[name]
                held.original = partial(_read_as, file, _written(file), name, held.shape, held.dtype)
            else:
                held.to_device(self.device)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) in self.loaded:
                    table[leaf] = self.loaded[id(tensor)]
                    continue
                if tensor.device.type != "meta":
                    tensor.data = tensor.data.to(self.device)
                    continue
                value = self._read(f"{prefix}{leaf}", tuple(tensor.shape), tensor.dtype).to(self.device)
                table[leaf] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
                self.loaded[id(tensor)] = table[leaf]
                self.kept.append(tensor)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        there = self.there[name]
        value = self.files.read(self.where[there], there, shape).to(dtype)
        if name in self.compared:
            self.sums[name] = sum_of(value)
        return value


def _as_saved(name: str) -> str:
    """Leave out what PEFT's adapters and PyTorch's ``checkpoint_wrapper`` put into a name."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return name.replace(_CHECKPOINTED, "")


def _names_of_tensors(model: nn.Module) -> Iterable[list[str]]:
    """All names of each tensor of a model, of parameters, buffers and stored weights; that of ``named_parameters`` first."""
    found: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors: dict[str, Any] = {**module._parameters, **module._buffers}
        if STORED in module.__dict__:
            tensors["weight"] = module.__dict__[STORED]
        for leaf, tensor in tensors.items():
            if tensor is not None:
                found.setdefault(id(tensor), []).append(f"{prefix}.{leaf}" if prefix else leaf)
    return found.values()


def _is_tied_head(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether it is the weight of a head that a model of transformers means to share with its embedding."""
    for module in model.modules():
        head_of = getattr(module, "get_output_embeddings", None)
        if callable(head_of) and getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            head = head_of()
            if getattr(head, "weight", None) is parameter:
                return True
    return False


def _files_of(checkpoint: Path) -> dict[str, Path]:
    """Find the file of each tensor of a checkpoint.

    Raises:
        PlanError: when there is no such file, or it is none of these.
    """
    if checkpoint.is_dir():
        found = [checkpoint / name for name in ("model.safetensors", _INDEX) if (checkpoint / name).is_file()]
        if not found:
            raise PlanError(
                f"there is neither model.safetensors nor {_INDEX} in {checkpoint}: name the folder or file of a checkpoint in "
                "safetensors' format"
            )
        checkpoint = found[0]
    if not checkpoint.is_file():
        raise PlanError(f"there is no checkpoint {str(checkpoint)!r}: name a safetensors file, its folder or its index")
    if checkpoint.suffix != ".json":
        return dict.fromkeys(_names_in(checkpoint), checkpoint)
    try:
        parts = {str(name): str(file) for name, file in json.loads(checkpoint.read_text(encoding="utf-8"))["weight_map"].items()}
    except (OSError, RecursionError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise PlanError(f"{checkpoint} is no index of safetensors files ({type(error).__name__}): it lacks a weight_map") from None
    where = {name: checkpoint.parent / file for name, file in parts.items()}
    if lost := sorted({file for file in where.values() if not os.path.isfile(file)}):  # of any length of a name
        raise PlanError(f"{checkpoint} names {lost[0].name}, which is not beside it: copy all files of the checkpoint")
    return where


def _names_in(file: Path) -> list[str]:
    with _Files() as files:
        return list(files.open(file).keys())


def _written(file: Path) -> tuple[int, int]:
    """What tells whether a file was written to."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _read_as(file: Path, written: tuple[int, int], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A weight of a checkpoint, in the model's format, on the CPU.

    Raises:
        PlanError: when it is not there as it was.
    """
    try:
        is_same = _written(file) == written
    except OSError as error:
        raise PlanError(f"{file} cannot be read any more ({error.strerror})") from None
    if not is_same:
        raise PlanError(f"{file} was written to since the model was loaded from it")
    with _Files() as files:
        return files.read(file, name, shape).to(dtype)


class _Files:
    """The files of a checkpoint, each opened once, from which tensors are read one at a time."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def open(self, file: Path) -> Any:
        """Open a file.

        Raises:
            PlanError: when it cannot be read.
        """
        if file not in self._open:
            try:
                from safetensors import safe_open
            except ImportError:
                raise PlanError("load_planned reads safetensors files: install safetensors") from None
            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu").__enter__()  # type: ignore[no-untyped-call]
            except Exception as error:
                raise PlanError(f"{file} cannot be read as a safetensors file ({error})") from None
        return self._open[file]

    def read(self, file: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor.

        Raises:
            PlanError: when it has another shape, or a format that products do not read.
        """
        try:
            tensor: torch.Tensor = self.open(file).get_tensor(name)
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(f"{name} cannot be read from {file} ({error})") from None
        if tensor.dtype.is_floating_point and tensor.dtype not in _FORMATS:
            raise PlanError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} in {file}: load_planned reads float32, bfloat16 and float16"
            )
        if not tensor.dtype.is_floating_point and len(shape) > 1:
            raise PlanError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} in {file}, a checkpoint that another library quantized: "
                "name one with float weights"
            )
        if tuple(tensor.shape) != shape:  # behind what others quantized, which is often packed
            raise PlanError(
                f"{name} has shape {list(tensor.shape)} in {file} and {list(shape)} in the model: name its own checkpoint"
            )
        return tensor
