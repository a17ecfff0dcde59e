"""Functions of PyTorch replaced by others of the same signature, for the time of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch.overrides import TorchFunctionMode


class ReplacedFunctions(TorchFunctionMode):
    """While active, the functions that ``replacements`` names run as what it gives for them."""

    replacements: ClassVar[Mapping[Any, Callable[..., Any]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, or what replaces it."""
        return self.replacements.get(func, func)(*args, **(kwargs or {}))
