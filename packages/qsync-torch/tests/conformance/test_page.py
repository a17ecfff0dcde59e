"""The page on writing a backend: what it shows, put together as it says, passes the suite that it names."""

import re
from pathlib import Path

from .test_suite import ENVIRONMENT, run

PAGE = Path(__file__).parents[4] / "docs" / "writing-a-backend.md"


def blocks(language):
    """Code blocks of the page, without the indentation of list items."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n" for indent, text in found]


def test_the_backend_of_the_page_passes(tmp_path, monkeypatch):
    plugin, backend, kernel = blocks("python")[:3]
    package = tmp_path / "qsync_kernels_mine"
    package.mkdir()
    for name, text in (("__init__", ""), ("plugin", plugin), ("backend", backend), ("product", kernel)):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}")
    arguments = ["-m", "pytest", "-q", "-p", "qsync_torch.conformance.plugin", "--pyargs", "qsync_torch.conformance"]
    result = run(*arguments, "--backend", "qsync_kernels_mine.backend:MyBackend", cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 40
    offered = run("-c", "from qsync_kernels_mine.plugin import *; print(qsync_register_backends()[0].name)", cwd=tmp_path)
    assert offered.stdout == "mine\n", offered.stderr


def test_the_page_names_every_operator():
    from qsync_core.backend import Op

    text = PAGE.read_text(encoding="utf-8")
    assert [op for op in Op.ALL if f"`{op}`" not in text] == []
