"""What the limits of ``tests/contracts/test_structure.py`` count, on small trees whose figures are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from structure.imports import cycles, floors, import_graph, modules, room_graph, room_sizes, within
from structure.texts import Citations, text_files, written_apart

CANNOT = "can " + "not"


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name.replace("torch:", "packages/qsync-torch/src/qsync_torch/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def graph_of(folder: Path, files: dict[str, str]):
    return import_graph(modules(tree(folder, {"torch:__init__.py": ""} | files)))


def test_lazy_typing_relative_and_submodule_imports_count(tmp_path):
    files = {
        "torch:a/__init__.py": "",
        "torch:a/one.py": "def f():\n    from qsync_torch.b import thing\n",
        "torch:a/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import qsync_torch.b\n",
        "torch:a/three.py": "from . import one\nfrom ..b import thing\nfrom .two import x\n",
        "torch:a/four.py": "from qsync_torch.a import one, unknown\nimport numpy\n",
        "torch:b.py": "",
    }
    graph = graph_of(tmp_path, files)
    assert graph["qsync_torch.a.one"] == graph["qsync_torch.a.two"] == {"qsync_torch.b"}
    assert graph["qsync_torch.a.three"] == {"qsync_torch.a.one", "qsync_torch.a.two", "qsync_torch.b"}
    assert graph["qsync_torch.a.four"] == {"qsync_torch.a.one", "qsync_torch.a"}


def test_rooms_can_import_each_other_where_no_modules_do(tmp_path):
    files = {"torch:a/x.py": "import qsync_torch.b.x", "torch:b/y.py": "import qsync_torch.a.y"}
    graph = graph_of(tmp_path, files | {"torch:a/y.py": "", "torch:b/x.py": ""})
    assert cycles(graph) == []
    assert cycles(room_graph(graph)) == [["qsync_torch.a", "qsync_torch.b"]]


def test_members_of_a_cycle_count_one_by_one_as_floors():
    graph = {"top": ["a"], "a": ["b"], "b": ["c", "low"], "c": ["a"], "low": [], "beside": ["low"]}
    assert cycles(graph) == [["a", "b", "c"]]
    assert floors(graph) == 5


def test_floors_of_one_package_leave_the_others_out():
    graph = {"qsync_torch.a": ["qsync_core.x", "qsync_torch.b"], "qsync_torch.b": ["qsync_core.x"], "qsync_core.x": []}
    assert floors(graph) == 3
    assert floors(within(graph, "qsync_torch")) == 2


def test_a_room_is_a_folder_and_its_init_does_not_count(tmp_path):
    files = {"torch:a.py": "", "torch:r/__init__.py": "", "torch:r/x.py": "", "torch:r/y.py": "", "torch:r/s/z.py": "1\n2\n"}
    found = tree(tmp_path, {"torch:__init__.py": ""} | files)
    assert room_sizes(found) == {"qsync_torch": 1, "qsync_torch/r": 2, "qsync_torch/r/s": 1}


DOCS = "docs"
"""Apart from the rest of a path: these tests cite pages of their own trees."""
PAGE = "# Title\n\n## 2 The cost\n\n### 2.1 Casts, once\n\n```\n# No heading\n```\n"


@pytest.mark.parametrize(
    ("cited", "dead"),
    [
        (f"{DOCS}/design/cost.md", None),
        (f"{DOCS}/design/none.md", f"{DOCS}/design/none.md"),
        (f"``{DOCS}/design/cost.md#21-casts-once``", None),
        (f"{DOCS}/design/cost.md#casts", f"{DOCS}/design/cost.md#casts"),
        (f"{DOCS}/design/cost.md#no-heading", f"{DOCS}/design/cost.md#no-heading"),
        ("the table of DES" + "IGN 6.1", "DES" + "IGN 6.1"),
        ("``r/x.py``, ``torch/r/x.py`` and `x.py`", None),
        ("``core/r/x.py``", "core/r/x.py"),
        ("``r/gone.py``", "r/gone.py"),
        ("`gone.py`", "gone.py"),
        (":func:`qsync_torch.r.x.f`, :class:`qsync_torch.r.x.C.method`, qsync_torch.r", None),
        (":func:`qsync_torch.r.x.g`", "qsync_torch.r.x.g"),
        (":mod:`qsync_torch.x`", "qsync_torch.x"),
    ],
)
def test_what_docstrings_cite(tmp_path, cited, dead):
    files = {
        f"{DOCS}/design/cost.md": PAGE,
        "torch:__init__.py": "",
        "torch:r/__init__.py": "",
        "torch:r/x.py": "def f(): ...\nclass C: ...\n",
        "torch:citing.py": f'"""First line.\n\nAs {cited} says.\n"""\n',
    }
    found = tree(tmp_path, files)
    citing = "packages/qsync-torch/src/qsync_torch/citing.py"
    expected = [f"{citing}:3: {dead}"] if dead else []
    assert [place.removesuffix(" says.") for place in Citations(found, text_files(found)).dead()] == expected


def test_code_cites_nothing_but_comments_do(tmp_path):
    found = tree(tmp_path, {"torch:__init__.py": "", "torch:x.py": 'NAME = "`gone.py`"\n# `gone.py` has it\n'})
    assert Citations(found, text_files(found)).dead() == ["packages/qsync-torch/src/qsync_torch/x.py:2: gone.py"]


def test_links_of_documents(tmp_path):
    text = f"[a]({DOCS}/page.md) [b]({DOCS}/page.md#title) [c]({DOCS}/page.md#none) [d](none.md) [e](https://x.org/y.md) [f](#here)"
    found = tree(tmp_path, {f"{DOCS}/page.md": PAGE, "README.md": text})
    assert Citations(found, text_files(found)).dead() == [f"README.md:1: {DOCS}/page.md#none", "README.md:1: none.md"]


def test_cannot_as_two_words_is_found_across_lines_and_comments(tmp_path):
    text = f"It {CANNOT} run.\n# It can\n# not run.\nIt {CANNOT} only run, it cannot stop.\n{CANNOT.capitalize()}.\n"
    found = tree(tmp_path, {"torch:x.py": text})
    name = "packages/qsync-torch/src/qsync_torch/x.py"
    assert written_apart(text_files(found)) == [f"{name}:1", f"{name}:2", f"{name}:5"]
