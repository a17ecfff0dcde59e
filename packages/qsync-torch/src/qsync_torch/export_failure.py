"""Why a model could not be exported: the line of the user's code where it stopped, and what to do about it."""

from __future__ import annotations

import re
import site
import sysconfig
import traceback
from pathlib import Path

import torch

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


def explain_export_failure(model: str, error: BaseException) -> str:
    """One message: which model, at which file and line, what happened, what to do next."""
    reason = _first_line(error)
    text = f"{type(error).__name__}: {error}"
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, text)), None)
    where = _user_line(error)
    place = f" because of {where}" if where else ""
    if advice is None:
        advice = "see that the model runs on the job's first batch, and that its forward uses only PyTorch operations on tensors"
    return f"{model} can not be exported{place}: {advice} ({reason})"


def explain_node_failure(model: str, node: torch.fx.Node, error: BaseException) -> str:
    """The same for a node of the exported graph that has no static shape."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n *(.*)', node.meta.get("stack_trace") or "")
    lines = [f"{name}:{number} ({code})" for wanted in (0, 1) for name, number, code in reversed(frames) if _rank(name) == wanted]
    place = f" because of {lines[0]}" if lines else ""
    return f"{model} can not be traced{place}: {_ADVICE[0][1]} ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _user_line(error: BaseException) -> str:
    """``file:line (source)`` of the deepest frame in a user's file; in a library's where there is none; '' where neither is."""
    frames: list[traceback.FrameSummary] = []
    seen: BaseException | None = error
    while seen is not None:
        frames = list(traceback.extract_tb(seen.__traceback__)) or frames
        seen = seen.__cause__
        if any(_rank(frame.filename) == 0 for frame in frames):
            break
    for wanted in (0, 1):
        for frame in reversed(frames):
            if _rank(frame.filename) == wanted:
                return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return ""


_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_PACKAGES = tuple(map(Path, {*site.getsitepackages(), site.getusersitepackages()}))
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def _rank(filename: str) -> int:
    """0: a user's file; 1: another library's; 2: ours, PyTorch's, the standard library's or none at all."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(_TORCH) or path.parent == _HERE:
        return 2
    if any(path.is_relative_to(packages) for packages in _PACKAGES):
        return 1
    return 2 if path.is_relative_to(_STANDARD_LIBRARY) else 0
