"""Whether a training step waits for its device by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_SAID = "synchronizing CUDA operation"
"""Part of what PyTorch warns of in its debug mode for synchronisations."""


def waits_for_device(step: Callable[[], Any], device: torch.device) -> bool:
    """Run a step and say whether some call in it waits for a CUDA device: one that reads a value (``.item()``, ``if mask.all():``,
    a boolean index), or copies from memory that is not pinned.

    PyTorch's debug mode for synchronisations is in force meanwhile.
    """
    if device.type != "cuda":
        return False
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any(_SAID in str(warning.message) for warning in caught)
