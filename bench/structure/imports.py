"""Reads who imports whom in the five packages from their source, without importing anything.

An import counts wherever it stands: at module level, inside a function, under ``TYPE_CHECKING``.  ``from package import name`` is
an import of the module ``package.name`` where there is one, else of ``package``.  That importing a module also runs the
``__init__`` of its folder does not count.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, Collection[str]]


def modules(tree: Path) -> dict[str, Path]:
    """Files of all packages by module name."""
    found = {}
    for path in sorted(tree.glob("packages/*/src/*/**/*.py")):
        parts = path.relative_to(tree).with_suffix("").parts[3:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules that each of ``files`` (by module name) imports."""
    graph = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = {target for node in ast.walk(ast.parse(path.read_text())) for target in _targets(node, package, files)}
        graph[name] = found - {name}
    return graph


def _targets(node: ast.AST, package: str, files: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in files)
    if not isinstance(node, ast.ImportFrom):
        return
    source = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        source = ".".join([*above, *filter(None, [node.module])])
    for alias in node.names:
        full = f"{source}.{alias.name}"
        if full in files:
            yield full
        elif source in files:
            yield source


def room(module: str) -> str:
    """The folder of a package, or the module directly in it, to which a module belongs."""
    return ".".join(module.split(".")[:2])


def room_graph(graph: Graph) -> dict[str, set[str]]:
    """Imports among rooms."""
    rooms: dict[str, set[str]] = {room(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[room(module)] |= {room(target) for target in targets} - {room(module)}
    return rooms


def within(graph: Graph, package: str) -> dict[str, set[str]]:
    """The part of a graph that lies in one package."""

    def inside(name: str) -> bool:
        return name.split(".")[0] == package

    return {name: {target for target in targets if inside(target)} for name, targets in graph.items() if inside(name)}


def components(graph: Graph) -> list[list[str]]:
    """Strongly connected components, each after those that it imports (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            found.append(sorted(stack[place:]))
            del stack[place:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules or rooms that import each other."""
    return [group for group in components(graph) if len(group) > 1]


def floors(graph: Graph) -> int:
    """Nodes on the longest chain of imports; the members of a cycle count one by one."""
    height: dict[str, int] = {}
    for group in components(graph):
        below = max((height[target] for node in group for target in graph[node] if target not in group), default=0)
        height |= dict.fromkeys(group, below + len(group))
    return max(height.values(), default=0)


def room_sizes(tree: Path) -> dict[str, int]:
    """``.py`` files directly in each folder of the packages, ``__init__.py`` not counted, by the folder's path below ``src``."""
    files: Iterable[Path] = modules(tree).values()
    return Counter("/".join(path.parent.relative_to(tree).parts[3:]) for path in files if path.name != "__init__.py")
