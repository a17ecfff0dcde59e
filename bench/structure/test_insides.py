"""What rows S1, S2, S5 and S6 count, on small sources and a replaced function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from structure.kinds import NEW_KIND, NEW_RUNG, files_of_patch, files_that_name_kinds, named_kinds
from structure.private_names import frame_walks, names_as_text, private_uses
from structure.replaced import modes_entered, replaced, standing

SOURCE = """
import os
import sys
import torch
from torch import nn
from torch.distributed import _broadcast_coalesced
from torch.utils import _pytree as pytree

_OWN = 3


class Net(nn.Module):
    def __init__(self):
        self._seed = os._exit

    def forward(self, x):
        with torch._C._DisableAutocast():
            pytree.tree_map(_broadcast_coalesced, x)
        nn.modules.conv._ConvNd.forward(x)
        torch.full((self._seed,), _OWN).sum()
        return x.detach()._version, x._replace(y=1), self._seed, x._seed


def caller():
    patched = [(nn.Module, "_call_impl", None), ("a text", "_other")]
    getattr(patched, "_private", hasattr(patched, "_seed"))
    return sys._getframe(1).f_back
"""


def test_private_names_of_pytorch_are_told_from_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "packages/qsync-torch/src/qsync_torch"
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(SOURCE)
    assert sorted(use.name for use in private_uses(tmp_path)) == [
        "_call_impl",
        "_version",
        "torch._C._DisableAutocast",
        "torch.distributed._broadcast_coalesced",
        "torch.nn.modules.conv._ConvNd.forward",
        "torch.utils._pytree",
    ]
    assert [use.name for use in names_as_text(tmp_path)] == ["_private"]
    assert [walk.name for walk in frame_walks(tmp_path)] == ["sys._getframe(1).f_back", "sys._getframe"]


def test_what_was_replaced_is_found_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    before = standing()
    assert replaced(before) == []
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *operands: None)
    monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__enter__", lambda self: None)
    assert {"torch.nn.modules.linear.Linear.forward", "torch.nn.functional.linear"} < set(replaced(before))
    assert "torch.autograd.graph.saved_tensors_hooks.__enter__" in replaced(before)


def test_modes_are_counted_by_coming_into_force() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __enter__(self) -> Mode:
            return super().__enter__()

    def run() -> None:
        with torch.device("cpu"), Mode():
            len(())

    assert modes_entered(run) == 2
    assert modes_entered(lambda: None) == 0


def test_kinds_are_named_by_identifiers_and_names_alone(tmp_path: Path) -> None:
    source = """
'''A linear operator, or conv2d.'''
from torch.nn import Conv2d as Layer
from a import _QuantizedLinear, bilinear, fit_linear

def conv_transpose2d(x):
    return Op.LINEAR_OUTPUT, "conv1d", "it takes linear operators", "mv conv3d conv_tbc", x.of_rows
"""
    assert [name for _, name in named_kinds(source)] == [
        "conv_transpose2d", "Conv2d", "_QuantizedLinear", "LINEAR_OUTPUT", "conv1d", "conv3d",
    ]  # fmt: skip
    for place in ("apply/a.py", "kinds/a.py", "aten/a.py", "models/a.py"):
        path = tmp_path / "packages/qsync-torch/src/qsync_torch" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert list(files_that_name_kinds(tmp_path)) == ["packages/qsync-torch/src/qsync_torch/apply/a.py"]


@pytest.mark.parametrize("patch, bound", [(NEW_KIND, 6), (NEW_RUNG, 8)], ids=["kind", "rung"])
def test_a_new_kind_and_a_new_rung_still_apply_and_touch_few_files(patch: Path, bound: int) -> None:
    """Rows S5b and S6, within their bounds."""
    assert 0 < len(files_of_patch(Path(__file__).resolve().parents[2], patch)) <= bound
