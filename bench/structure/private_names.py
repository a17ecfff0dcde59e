"""Row S2: PyTorch's private names in the packages' sources, and walks of Python frames, read without importing anything.

A use is an import or an attribute with a name that begins with one underscore: of ``torch`` or what is imported from it, or of any
object, where no source here gives the name a meaning (``x._version``).  So is the name of what is replaced for a while, in a tuple
``(owner, "_name", stand_in)``.  Names that are asked for where they are, as text, are counted apart.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from structure.imports import modules

_FRAMES = frozenset({"sys._getframe", "inspect.stack", "inspect.currentframe", "f_back"})
_OF_OTHERS = frozenset({"_replace", "_fields", "_asdict", "_make", "_exit", "_models", "_optimizers"})
"""What named tuples, Python and Accelerate have."""


@attrs.frozen
class Use:
    """Where a name stands in a source."""

    module: str
    line: int
    name: str


def private_uses(tree: Path) -> list[Use]:
    """Every use of a private name of PyTorch's."""
    sources, own = _read(tree)
    return [Use(module, *found) for module, source in sources.items() for found in _uses(source, own)]


def names_as_text(tree: Path) -> list[Use]:
    """Every private name without a meaning here that ``getattr`` or ``hasattr`` asks for: where it is not, nothing is lost."""
    sources, own = _read(tree)
    return [
        Use(module, node.lineno, name)
        for module, source in sources.items()
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        for name in _private_texts(node.args[1:2], own)
    ]


def _private_texts(nodes: Sequence[ast.expr], own: Collection[str]) -> Iterator[str]:
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.isidentifier() and _is_private(text) and text not in own:
            yield text


def frame_walks(tree: Path) -> list[Use]:
    """Every place that asks for a Python frame, or for the one that called it."""
    found = []
    for module, source in _parsed(tree).items():
        for node in ast.walk(source):
            if isinstance(node, ast.Attribute) and (node.attr in _FRAMES or ast.unparse(node) in _FRAMES):
                found.append(Use(module, node.lineno, ast.unparse(node)))
    return found


def _parsed(tree: Path) -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in modules(tree).items()}


def _read(tree: Path) -> tuple[dict[str, ast.Module], set[str]]:
    """The sources, and the private names that have a meaning in them."""
    sources = _parsed(tree)
    return sources, {name for source in sources.values() for name in _defined(source)} | _OF_OTHERS


def _defined(source: ast.Module) -> Iterator[str]:
    """Private names that a source gives a meaning."""
    for node in ast.walk(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_qsync"):
            yield node.value


def _uses(source: ast.Module, own: Collection[str]) -> Iterator[tuple[int, str]]:
    imported = _imported(source)
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_torch(alias.name) and _is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names if _is_private(name))
        elif isinstance(node, ast.Tuple) and node.elts and isinstance(node.elts[0], (ast.Name, ast.Attribute)):
            yield from ((node.lineno, name) for name in _private_texts(node.elts[1:2], own))
    for node in _longest_chains(source):
        root, *rest = _parts(node)
        found = imported.get(root)
        if found is None:
            yield from ((node.lineno, part) for part in rest if _is_private(part) and part not in own)
        elif _is_torch(found) and _is_private(".".join(rest)):
            yield node.lineno, _name([*found.split("."), *rest])


def _imported(source: ast.Module) -> Mapping[str, str]:
    """What a name at the beginning of an expression stands for, where it was imported."""
    found: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _longest_chains(source: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes that are no part of a longer chain of them."""
    inner = {id(node.value) for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    yield from (node for node in ast.walk(source) if isinstance(node, ast.Attribute) and id(node) not in inner)


def _parts(node: ast.expr) -> list[str]:
    """The names of a chain of attributes; the first is empty where it begins with something else than a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def _name(parts: Sequence[str]) -> str:
    """A chain up to its last private part, and what is asked of that; empty where no part is private."""
    last = max((index for index, part in enumerate(parts) if _is_private(part)), default=None)
    return "" if last is None else ".".join(parts[: last + 2])


def _is_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
