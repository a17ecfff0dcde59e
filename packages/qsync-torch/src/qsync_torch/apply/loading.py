"""``load_planned``: a model whose weights go straight from their checkpoint into the formats of a plan, one at a time.

The model is built on the meta device, where it takes no memory.  Each weight is read from safetensors files, put on the device and
stored, and the float one is gone before the next is read: the most memory is that of the plan and one weight.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.apply import apply_
from qsync_torch.apply.plan_fit import STORED
from qsync_torch.apply.stored_modules import HeldWeight

_INDEX = "model.safetensors.index.json"
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def load_planned(
    model: nn.Module,
    plan: Any,
    checkpoint: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    rename: Callable[[str], str] | None = None,
    **options: Any,
) -> AppliedPlan:
    """Put a model under a plan, and load its weights straight into the formats in which the plan stores them.

    Args:
        model: its parameters on the meta device (``with torch.device("meta"): ...``); what is elsewhere already, adapters with
            values of their own and buffers say, is kept and moved.
        plan: as :func:`~qsync_torch.apply.apply.apply_` takes it.
        checkpoint: a safetensors file, a folder with one (``model.safetensors``) or with several and their index, or the index
            (``model.safetensors.index.json``).
        device: where the model is to run.
        rename: the name of a parameter in the checkpoint, from that in the model; by default the same, without what PEFT's
            adapters put into it (``base_model.model.`` and ``.base_layer``).
        options: of :func:`~qsync_torch.apply.apply.apply_`, such as ``group``.

    Returns:
        A handle, as of ``apply_``.  ``state_dict()`` holds stored weights as the checkpoint has them, in the
        model's format, while its files are there.

    Raises:
        PlanError: when a file is missing or cannot be read; when it lacks a weight or holds one of another shape or in a format
            that is no float of 16 or 32 bits; when a buffer is on the meta device.
        QSyncError: as ``apply_``.
    """
    target = torch.device(device)
    where = _files_of(Path(checkpoint))
    rename = rename or _without_adapters
    waiting = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if waiting := [name for name in waiting if rename(name) not in where]:
        raise PlanError(
            f"buffer {waiting[0]} of this {type(model).__name__} is on the meta device and {checkpoint} does not hold it: build "
            "the model so that its buffers have values (accelerate.init_empty_weights() does)"
        )
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta" and rename(name) not in where]
    if missing:
        raise PlanError(
            f"{checkpoint} holds no {rename(missing[0])}, which {missing[0]} of this {type(model).__name__} waits for"
            f"{f', nor {len(missing) - 1} others' if len(missing) > 1 else ''}: name the model's own checkpoint, or say by rename= "
            "what its weights are called there"
        )
    applied = apply_(model, plan, **options)
    try:
        with _Files() as files:
            loaded: dict[int, torch.Tensor] = {}
            kept: list[torch.Tensor] = []
            for prefix, module in model.named_modules():
                _load_module(module, f"{prefix}." if prefix else "", where, files, target, rename, loaded, kept)
    except BaseException:
        applied.remove()
        raise
    return applied


def _load_module(
    module: nn.Module,
    prefix: str,
    where: Mapping[str, Path],
    files: _Files,
    target: torch.device,
    rename: Callable[[str], str],
    loaded: dict[int, torch.Tensor],
    kept: list[torch.Tensor],
) -> None:
    """Load what a module itself holds; ``loaded``: tensors that others may hold too, by the identity of those on the meta device,
    which are ``kept`` so that no other gets it."""
    held: HeldWeight | None = module.__dict__.get(STORED)
    if held is not None:
        name = rename(f"{prefix}weight")
        if held.device.type == "meta":
            held.write(files.read(where[name], name, held.shape).to(held.dtype), target)
            held.original = partial(_read_as, where[name], name, held.shape, held.dtype)
        else:
            held.to_device(target)
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for kind in tables:
        for leaf, tensor in kind.items():
            if tensor is None:
                continue
            if id(tensor) in loaded:
                kind[leaf] = loaded[id(tensor)]
                continue
            if tensor.device.type != "meta":
                tensor.data = tensor.data.to(target)
                continue
            name = rename(f"{prefix}{leaf}")
            value = files.read(where[name], name, tuple(tensor.shape)).to(target, tensor.dtype)
            kind[leaf] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            loaded[id(tensor)] = kind[leaf]
            kept.append(tensor)


def _without_adapters(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


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
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise PlanError(f"{checkpoint} is no index of safetensors files ({type(error).__name__}): it lacks a weight_map") from None
    where = {name: checkpoint.parent / file for name, file in parts.items()}
    if lost := sorted({file for file in where.values() if not file.is_file()}):
        raise PlanError(f"{checkpoint} names {lost[0].name}, which is not beside it: copy all files of the checkpoint")
    return where


def _names_in(file: Path) -> list[str]:
    with _Files() as files:
        return list(files.open(file).keys())


def _read_as(file: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A weight of a checkpoint, in the model's format, on the CPU.

    Raises:
        PlanError: when it is not there as it was.
    """
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
        if tuple(tensor.shape) != shape:
            raise PlanError(
                f"{name} has shape {list(tensor.shape)} in {file} and {list(shape)} in the model: name its own checkpoint"
            )
        if tensor.dtype.is_floating_point and tensor.dtype not in _FORMATS:
            raise PlanError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} in {file}: load_planned reads float32, bfloat16 and float16"
            )
        if not tensor.dtype.is_floating_point and len(shape) > 1:
            raise PlanError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} in {file}, a checkpoint that another library quantized: "
                "name one with float weights"
            )
        return tensor
