"""Finds citations that lead nowhere, and "cannot" written as two words.

Cited are: a document by its name in capitals, pages below ``docs/`` (also ``#anchor``), files by a name or path in code quotes,
modules and what is in them by their dotted names, and what Markdown links to.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

from structure.imports import modules

TEXT = frozenset({".py", ".md", ".toml", ".ini", ".txt", ".yml", ".yaml", ".json", ".j2", ".h", ".cu", ".cuh", ".html", ".cff", ""})
APART = re.compile(r"\bcan[\s#]+not\b(?! only\b)", re.IGNORECASE)

_QUOTED_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|json|ini|yml|cu|cuh|j2))`")
_FILE_NAME = re.compile(r"`([\w-]+\.(?:py|md|toml|cu|cuh))`")
_PAGE = re.compile(r"(?<!\]\()(?<![\w/.<-])(?:\.\./)*(docs/[\w./-]+\.(?:md|json))(?:#([\w-]+))?")
_DOCUMENT = re.compile(r"\bDESIGN\b(?:[\s#]+sections?)?(?:[\s#]+\d(?:[\d.]*\d)?)?")
"""A document that was never part of the repository."""
_DOTTED = re.compile(r"(?<![\w./-])qsync_(?:core|planner|torch|kernels_triton|kernels_cutlass)(?:\.[A-Za-z_]\w*)+(?![\w/])")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def text_files(tree: Path) -> dict[str, str]:
    """Tracked text files by their path in the tree; every file of a tree that is not a repository."""
    if (tree / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, stdout=subprocess.PIPE, text=True, check=True).stdout
        paths = [tree / name for name in listed.split("\0") if name]
    else:
        paths = [path for path in sorted(tree.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    found = {}
    for path in paths:
        if path.suffix in TEXT and path.is_file():
            try:
                found[path.relative_to(tree).as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def written_apart(texts: Mapping[str, str]) -> list[str]:
    """Where "cannot" is two words, as ``file:line``."""
    return [f"{name}:{_line(text, match.start())}" for name, text in texts.items() for match in APART.finditer(text)]


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


class Citations:
    """Looks up what texts of one tree cite."""

    def __init__(self, tree: Path, texts: Mapping[str, str]) -> None:
        self._tree, self._texts = tree, texts
        self._modules = modules(tree)
        self._names: dict[str, frozenset[str]] = {}

    def dead(self) -> list[str]:
        """Citations that lead nowhere, as ``file:line: what``."""
        found = []
        for name, text in self._texts.items():
            if name.endswith((".py", ".md", ".toml", ".ini", ".yml")):
                found += [f"{name}:{_line(text, offset)}: {what}" for offset, what in self._dead_in(name, text)]
        return found

    def _dead_in(self, name: str, text: str) -> Iterator[tuple[int, str]]:
        yield from ((match.start(), " ".join(match[0].split())) for match in _DOCUMENT.finditer(text))
        for match in _PAGE.finditer(text):
            if reason := self._page(*match.groups()):
                yield match.start(), reason
        prose = _prose(text) if name.endswith(".py") else text
        for match in _QUOTED_PATH.finditer(prose):
            if not match[1].startswith("docs/") and not self._is_file(name, match[1]):
                yield match.start(), match[1]
        for match in _FILE_NAME.finditer(prose):
            if not self._is_file(name, match[1]):
                yield match.start(), match[1]
        for match in _DOTTED.finditer(prose):
            if not self._is_name(match[0]):
                yield match.start(), match[0]
        if name.endswith(".md"):
            for match in _LINK.finditer(text):
                if reason := self._link(name, match[1]):
                    yield match.start(), reason

    def _page(self, page: str, anchor: str | None) -> str:
        """The citation of a page, if it leads nowhere; else nothing."""
        if page in self._texts and (not anchor or anchor in _anchors(self._texts[page])):
            return ""
        return f"{page}#{anchor}" if anchor else page

    def _is_file(self, citing: str, path: str) -> bool:
        """From the citing file's folder, or the end of some file's path; ``core/errors.py`` stands for ``qsync_core/errors.py``."""
        ends = (f"/{path}", f"/qsync_{path}")
        return (self._tree / citing).parent.joinpath(path).exists() or any(f"/{name}".endswith(ends) for name in self._texts)

    def _is_name(self, dotted: str) -> bool:
        """Whether it is a module, or something that a module has at its top level, or an attribute of that."""
        module, rest = dotted, ""
        while module not in self._modules:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}"
            if not module:
                return False
        return not rest or rest.split(".")[0] in self._top_level(module)

    def _top_level(self, module: str) -> frozenset[str]:
        if module not in self._names:
            self._names[module] = frozenset(_defined(ast.parse(self._modules[module].read_text())))
        return self._names[module]

    def _link(self, name: str, target: str) -> str:
        """Why a Markdown link leads nowhere; pages that the documentation generates are the documentation's own test."""
        if "://" in target or target.startswith(("mailto:", "#")):
            return ""
        path, _, anchor = target.partition("#")
        found = (self._tree / name).parent.joinpath(path).resolve()
        if not found.exists():
            return "" if name.startswith("docs/") and path.endswith(".md") else target
        inside = found.relative_to(self._tree.resolve()).as_posix() if found.is_relative_to(self._tree.resolve()) else ""
        return target if anchor and inside in self._texts and anchor not in _anchors(self._texts[inside]) else ""


def _prose(source: str) -> str:
    """Comments and docstrings, everything else blanked, so that offsets stay."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kept = [" " if character != "\n" else character for character in source]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""'))
        if docstring or token.type == tokenize.COMMENT:
            first, last = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
            kept[first:last] = source[first:last]
    return "".join(kept)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module has: what it defines, assigns and imports, and texts, which may be names that it hands out lazily."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
    yield from ("__version__", "__doc__", "__path__")


def _anchors(page: str) -> frozenset[str]:
    """The anchors that mkdocs gives to a page's headings."""
    found = set()
    for heading in _HEADING.findall(_CODE_BLOCK.sub("", page)):
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return frozenset(found)
