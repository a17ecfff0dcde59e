"""Whether a script may reach its line, from its source alone: no only where that is certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsync_torch.capturing.sources import may_have_line

LINE = "qsync.hybrid(model, optimizer, loss, loader)"


def look(folder: Path, files: dict[str, str]) -> bool:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return may_have_line(folder / "train.py")


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "import os, sys, torch\nfrom transformers import Trainer\nTrainer().train()"},
        {"train.py": "import models", "models.py": "import torch.nn as nn\nfrom numpy import array"},
        {"train.py": "from library.models import Net", "library/__init__.py": "", "library/models.py": "from . import layers"},
        {"train.py": "from data.digits import load", "data/digits.py": "import sklearn.datasets"},
        {"train.py": "import torch\nfor f in model.eval(): torch.compile(f)"},
        {"train.py": "import qsync_torch as qsync\nqsync.apply_(model, 'run')"},
    ],
)
def test_nothing_that_is_imported_has_the_line(tmp_path, files):
    assert not look(tmp_path, files)


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": LINE},
        {"train.py": "from qsync_torch.integrations.lightning import HybridStrategy"},
        {"train.py": "import loop", "loop.py": LINE},
        {"train.py": "import numpy", "numpy.py": LINE},
        {"train.py": "def main():\n    from loop import run", "loop.py": LINE},
        {"train.py": "from library import start", "library/__init__.py": "from .start import start", "library/start.py": LINE},
        {"train.py": "from library import start", "library/__init__.py": "", "library/start.py": LINE},
        {"train.py": "import library.deep.start", "library/deep/start.py": "from ...library import loop", "library/loop.py": LINE},
        {"train.py": "from library.deep import a", "library/deep/a.py": "from .. import loop", "library/loop.py": LINE},
    ],
)
def test_the_line_in_any_module_of_ones_own(tmp_path, files):
    assert look(tmp_path, files)


@pytest.mark.parametrize(
    "text",
    [
        "import some_package_of_someone",
        "import attrs",  # which an installer has put there, and which is not known to hold no line
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module as load",
        "exec(open('loop').read())",
        "__import__(name)",
        "import sys\nsys.path.insert(0, '../lib')\nimport models",
        "from lightning.pytorch.cli import LightningCLI\nLightningCLI()",
        "def :",
    ],
)
def test_what_cannot_be_told_is_left_to_the_run(tmp_path, text):
    assert look(tmp_path, {"train.py": text, "models.py": ""})
