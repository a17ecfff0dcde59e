"""Rows S5 and S6: where the code names kinds of operators, and how many files a new kind or a new rung touches."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

KINDS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
"""What ATen calls them; modules of PyTorch and constants have the same names in other letters."""
_PLAIN = {name.replace("_", "") for name in KINDS}
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
HOMES = ("kinds", "kernels", "aten", "models")
"""Rooms that are about kinds: their tables, kernels, named models.  Backends in packages of their own are kernels."""
_OTHER = re.compile(r"linear_(fit|attributes)|fit_linear|linear_sum|LinearLR|linear program", re.IGNORECASE)


def named_kinds(source: str) -> list[tuple[int, str]]:
    """The names of kinds in code: identifiers, and texts that are nothing but names; prose and docstrings are not.

    Returns:
        Line and name of each.
    """
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    return [(line, text) for node in ast.walk(tree) for line, text in _texts(node) if id(node) not in prose and _names_one(text)]


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    line = getattr(node, "lineno", 0)
    for field in ("id", "attr", "name", "asname", "module", "arg"):
        if isinstance(text := getattr(node, field, None), str):
            yield line, text.rpartition(".")[2]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w. ]+", node.value):
        words = node.value.split()
        if len(words) == 1 or any("_" in word for word in words):  # a name, or names in a row of a table
            yield from ((line, word) for word in words)


def _names_one(text: str) -> bool:
    """Whether an identifier has a kind's name in it: ``Conv2d``, ``_conv2d``, ``LINEAR_OUTPUT``, ``QuantizedLinear``."""
    if _OTHER.search(text):
        return False
    words = [word.lower() for word in _WORDS.findall(text)]
    joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    return bool(joined & _PLAIN)


def files_that_name_kinds(tree: Path) -> dict[str, list[tuple[int, str]]]:
    """By path, every file of the packages outside of the rooms that are about kinds, with where it names one."""
    found = {}
    for path in sorted(tree.glob("packages/*/src/**/*.py")):
        rooms = path.relative_to(tree / "packages").with_suffix("").parts
        if rooms[0].startswith("qsync-kernels") or any(home in rooms for home in HOMES):
            continue
        if names := named_kinds(path.read_text()):
            found[str(path.relative_to(tree))] = names
    return found


NEW_KIND = Path(__file__).with_name("conv_transpose3d.patch")
"""The worked example of docs/operator-kinds.md, with its tests."""
NEW_RUNG = Path(__file__).with_name("block_scales.patch")
"""Int8 activations with one scale per 128 columns, on the reference backend, with the test that it does what it should."""


def files_of_patch(tree: Path, patch: Path) -> list[str]:
    """The files that a patch touches, those of tests not counted.

    Raises:
        subprocess.CalledProcessError: when it does not apply to the tree any more: make it anew.
    """
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=tree, check=True)
    paths = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)
    return [path for path in paths if "/tests/" not in path and not path.startswith("tests/")]
