"""The pages on backends: what the tutorial shows, put together as it says, passes the suite that it names."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qsync_core.tuning.store import read_store

from .test_suite import ENVIRONMENT, run, run_suite

DOCS = Path(__file__).parents[4] / "docs"
TUTORIAL, REFERENCE = DOCS / "first-backend.md", DOCS / "writing-a-backend.md"


def blocks(language, page=TUTORIAL):
    """Code blocks of a page, without the indentation of list items."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n" for indent, text in found]


def write_modules(folder, **texts):
    """Of the page's package."""
    package = folder / "qsync_kernels_mine"
    package.mkdir(exist_ok=True)
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The page's package where Python finds it, with the entry points that its pyproject.toml gives it; the folder."""
    plugin, backend, kernel = blocks("python")[:3]
    write_modules(tmp_path, __init__="", plugin=plugin, backend=backend, product=kernel)
    project = tomllib.loads(blocks("toml")[0])["project"]
    about = tmp_path / f"qsync_kernels_mine-{project['version']}.dist-info"
    about.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (about / "METADATA").write_text(head + "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"]))
    entries = [line for group, names in project["entry-points"].items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    (about / "entry_points.txt").write_text("\n".join(entries) + "\n")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}")
    monkeypatch.setitem(ENVIRONMENT, "QSYNC_TUNING", str(tmp_path / "tuning.sqlite"))
    return tmp_path


def test_the_package_of_the_page_can_be_built():
    system = tomllib.loads(blocks("toml")[0])["build-system"]
    assert system == {"requires": ["hatchling"], "build-backend": "hatchling.build"}
    files = re.findall(r"^ +([\w.]+\.\w+)\b", blocks("text")[0], re.MULTILINE)
    assert files == ["pyproject.toml", "__init__.py", "plugin.py", "backend.py", "product.py"]


def passed(cwd):
    """How many tests of the suite the page's backend passes, if none fails."""
    result = run_suite("mine", cwd)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    return int(re.search(r"(\d+) passed", result.stdout)[1])


@pytest.mark.nightly
def test_the_backend_of_the_page_passes(installed):
    assert passed(installed) > 40


@pytest.mark.nightly
def test_the_backend_with_the_fused_activation_passes(installed):
    activation, backend = blocks("python")[4:]
    write_modules(installed, activation=activation, backend=backend)
    assert passed(installed) > 80


def test_the_model_of_the_page_runs_on_the_backend(installed):
    count = """
import qsync_kernels_mine.product as product
kernel, calls = product.linear_output, []
product.linear_output = lambda *arguments: calls.append(1) or kernel(*arguments)
"""
    result = run("-c", count + blocks("python")[3] + "print(len(calls), model[0].weight.grad.shape)", cwd=installed)
    assert result.stdout == "1 torch.Size([32, 64])\n", result.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_of_the_pages_run(installed):
    """Those that list and time kernels, as they stand there."""
    lines = "".join(blocks("bash") + blocks("bash", REFERENCE)).splitlines()
    script = "\n".join(line for line in lines if line.startswith(("qsync ", "JOB=", "RUNGS=")))
    assert script.count("qsync tune") == 2
    with_module = f'set -e\nqsync() {{ "{sys.executable}" -m qsync_core.cli "$@"; }}\n{script}\n'
    result = subprocess.run(
        ["bash", "-c", with_module], cwd=installed, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    keys = [key for key, _, _ in read_store(installed / "tuning.sqlite")[0]]
    assert {key.op for key in keys if key.backend == "mine"} == {"linear.output"}
    assert any("gw=int8" in key.formats for key in keys if key.op == "linear.grad_weight")


def test_the_reference_names_every_operator():
    from qsync_core.kernels.backend import Op

    text = REFERENCE.read_text(encoding="utf-8")
    assert [op for op in Op.ALL if f"`{op}`" not in text] == []
