"""What a script can reach, read without running it: whether the line that says what is trained may be anywhere in it.

The answer is no only where that is certain: the script and the modules of the person's own that it imports are read to the end,
none of them runs code that is not there to be read, and all else that they import is Python's own or a well-known package.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_NAMES_LINE = re.compile(rb"hybrid|LightningCLI", re.IGNORECASE)
"""The first is in the name of every line (``hybrid``, ``HybridStrategy``); the second takes Lightning's from a file of settings."""
_RUNS_OTHER_CODE = frozenset({"exec", "eval", "__import__", "importlib", "runpy", "pkgutil", "site"})
_WELL_KNOWN = frozenset(
    """
    PIL accelerate cv2 datasets einops evaluate lightning matplotlib numpy pandas peft pytorch_lightning qsync_core qsync_planner
    qsync_torch safetensors scipy seaborn sentencepiece sklearn tensorboard tensorboardX tiktoken timm tokenizers torch torchaudio
    torchdata torchmetrics torchtext torchvision tqdm transformers triton wandb yaml
    """.split()  # noqa: SIM905
)
"""Packages that do not hold the line, and are too large to read."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_MOST_FILES = 500


def may_have_line(script: Path) -> bool:
    """Whether a script may reach a line by which it says what it trains; False only where it certainly does not."""
    path = [str(script.resolve().parent), *sys.path]
    waiting, read = [(script.resolve(), "")], set[Path]()
    while waiting:
        file, package = waiting.pop()
        if file in read:
            continue
        read.add(file)
        try:
            text = file.read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return True  # Python says what is wrong with it
        if _NAMES_LINE.search(text) or len(read) > _MOST_FILES or _runs_other_code(tree):
            return True
        for module in _imported(tree, package):
            found = _files_of(module, path)
            if found is None:
                return True
            waiting += found
    return False


def _runs_other_code(tree: ast.AST) -> bool:
    """Whether a module runs text as code, or changes where modules are looked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _RUNS_OTHER_CODE:
            return True
        if isinstance(node, ast.Attribute) and node.attr == "path" and isinstance(node.value, ast.Name) and node.value.id == "sys":
            return True
    return False


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Names of what a module of a package imports, and of what may be a module among it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join(filter(None, (*above, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _files_of(module: str, path: Sequence[str]) -> list[tuple[Path, str]] | None:
    """The person's own files that importing a module runs, each with the package it is in; None where that cannot be told."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top, path) if top else None
    if (top in sys.stdlib_module_names or top in _WELL_KNOWN) and not (spec and _is_own(spec) and not top.startswith("qsync_")):
        return None if top in _RUNS_OTHER_CODE else []
    found: list[tuple[Path, str]] = []
    name = top
    while spec is not None:
        if not _is_own(spec):
            return None
        is_package = spec.submodule_search_locations is not None
        if spec.origin:  # a folder without __init__.py has none
            found.append((Path(spec.origin).resolve(), name if is_package else name.rpartition(".")[0]))
        if not rest or not is_package:
            return found
        name = f"{name}.{rest[0]}"
        # By its last name: the finder looks for a dotted one's parents among imported modules.
        spec = PathFinder.find_spec(rest.pop(0), list(spec.submodule_search_locations or ()))
    return found if name != top else None  # what is no module below a package is one of its names


def _is_own(spec: ModuleSpec) -> bool:
    """Whether a module is source code that neither Python nor an installer has put there."""
    if not spec.origin:
        return spec.submodule_search_locations is not None
    place = Path(spec.origin)
    installed = _INSTALLED.intersection(place.parts) or place.is_relative_to(sysconfig.get_path("stdlib"))
    return place.suffix == ".py" and not installed
