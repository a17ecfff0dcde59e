"""Activation checkpointing taken out of observed passes: collectors change what operators read, and a forward that runs again in
backward would do so without that change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from qsync_torch.observing.collector import CollectorUnavailable
from qsync_torch.torch_internals import TorchDispatchMode, saves_through_hooks

_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of modules that switch activation checkpointing: transformers' and diffusers', and timm's."""


class Uncheckpointed(AbstractContextManager["Uncheckpointed"]):
    """While in force, checkpointed parts of a model keep what backward needs, so that no backward pass runs them again.

    Modules that are switched by an attribute are switched off.  Other checkpoints (those that are not reentrant) hand what is saved
    to hooks of their own, and the innermost hooks count: in a checkpoint, a module's forward has hooks that keep it, and so has
    each function while :meth:`forward` is in force.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self._switched: list[tuple[torch.nn.Module, str]] = []
        self._open: list[AbstractContextManager[Any]] = []
        self._has_checkpoints = False

    def __enter__(self) -> Uncheckpointed:
        for module in self._model.modules():
            for name in _SWITCHES:
                if getattr(module, name, None) is True:
                    setattr(module, name, False)
                    self._switched.append((module, name))
            self._hooks.append(module.register_forward_pre_hook(self._begin, prepend=True))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, name in self._switched:
            setattr(module, name, True)
        self._hooks.clear()
        self._switched.clear()

    def forward(self) -> AbstractContextManager[Any]:
        """A block for a forward pass, inside all others that replace functions."""
        return _KeptByFunctions(self.keeping)

    def backward(self) -> AbstractContextManager[Any]:
        """A block for the backward passes behind it, where something may run again all the same, without what collectors change.

        Raises:
            CollectorUnavailable: when it does.
        """
        return _NothingRunsAgain() if self._has_checkpoints else nullcontext()  # type: ignore[no-untyped-call]

    def keeping(self) -> AbstractContextManager[Any]:
        """Hooks for what is called now, in a checkpoint; nothing elsewhere."""
        if not saves_through_hooks(besides=_itself):
            return nullcontext()
        self._has_checkpoints = True
        return saved_tensors_hooks(_itself, _itself)

    def _begin(self, *_: Any) -> None:
        self._open.append(self.keeping())
        self._open[-1].__enter__()

    def _end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


class _KeptByFunctions(TorchFunctionMode):
    def __init__(self, keeping: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._keeping = keeping

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._keeping():
            return func(*args, **(kwargs or {}))


class _NothingRunsAgain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if saves_through_hooks(besides=_itself):
            raise CollectorUnavailable(
                "an autograd function outside of all modules is checkpointed, or saves through hooks, and would run again; call it "
                "in a module's forward, or observe the model without checkpoints"
            )
        return func(*args, **(kwargs or {}))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
