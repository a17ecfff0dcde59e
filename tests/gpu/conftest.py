"""Everything in this folder needs a CUDA device; where there is none each test is skipped by name, with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("QSYNC_WAIT_FOR_KERNELS", "1")  # a test is of the kernels that it names


def _why_not() -> str | None:
    try:
        import torch
    except ImportError:
        return "needs a CUDA device, and torch is not installed"
    return None if torch.cuda.is_available() else "needs a CUDA device, and this machine has none"


def pytest_collection_modifyitems(items):
    reason = _why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"{item.name} {reason}"))
