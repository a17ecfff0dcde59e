"""What a package index shows of the five distributions: licence, authors and addresses from one place, links that work there."""

from __future__ import annotations

import email
import re
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import shared_metadata
from contracts.environment import MODULES, ROOT, pyproject, run

TABLE = shared_metadata.shared(ROOT)
FILES = ("pyproject.toml", "README.md")


def test_every_package_says_what_the_root_says():
    assert shared_metadata.out_of_date(ROOT) == [], "run: python release/shared_metadata.py"


def test_a_new_address_reaches_every_file(tmp_path):
    for name in (
        "pyproject.toml",
        "LICENSE",
        "SECURITY.md",
        *(f"packages/{p}/{f}" for p in MODULES for f in ("pyproject.toml", "README.md")),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text().replace(TABLE["repository"], "https://old.example/qsync"))
    root = tmp_path / "pyproject.toml"
    root.write_text(root.read_text().replace("https://old.example/qsync", "https://new.example/q"))
    files = shared_metadata.written(tmp_path)
    assert len(files) == 3 * len(MODULES) + 1
    assert [path for path, text in files.items() if "old.example" in text] == []
    assert "[to the project](https://new.example/q/security)" in files[tmp_path / "SECURITY.md"]
    assert "https://new.example/q/blob/main/docs/" in files[tmp_path / "packages" / "qsync-kernels-cutlass" / "README.md"]


@pytest.mark.parametrize("contact", ["mailto:security@new.example", "https://elsewhere.example/report"])
def test_the_place_to_report_to_is_one_variable(contact, tmp_path):
    for name in ("pyproject.toml", "LICENSE", "SECURITY.md", *(f"packages/{p}/{f}" for p in MODULES for f in FILES)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    root = tmp_path / "pyproject.toml"
    root.write_text(root.read_text().replace(f'security = "{TABLE["security"]}"', f'security = "{contact}"'))
    files = shared_metadata.written(tmp_path)
    assert f"[to the project]({contact}), with the version" in files[tmp_path / "SECURITY.md"]
    for package in MODULES:
        assert f'urls.Security = "{contact}"' in files[tmp_path / "packages" / package / "pyproject.toml"]
    assert [path for path, text in files.items() if f'"{TABLE["security"]}"' in text or f"({TABLE['security']})" in text] == []


@pytest.mark.parametrize("policy", ["# Security\n", "[a](b), with the version [c](d), with the version\n"])
def test_a_policy_that_names_no_place_or_several_is_refused(policy, tmp_path):
    for name in ("pyproject.toml", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "SECURITY.md").write_text(policy)
    with pytest.raises(ValueError, match=r"SECURITY\.md has [02] links to the place to report to; write one"):
        shared_metadata.written(tmp_path)


def test_every_python_of_the_classifiers_is_allowed():
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(TABLE["classifiers"]))
    assert {pyproject(name)["project"]["requires-python"] for name in MODULES} == {f">={pythons[0]}"}


@pytest.mark.parametrize("distribution", MODULES)
def test_links_of_a_readme_work_on_a_package_index(distribution):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "packages" / distribution / "README.md").read_text())
    assert [link for link in links if "://" not in link and not link.startswith("#")] == []
    files = shared_metadata.file_address(TABLE, "")
    assert [link for link in links if link.startswith(files) and not (ROOT / link.removeprefix(files).split("#")[0]).exists()] == []


def check_metadata(metadata: Message, distribution: str) -> None:
    assert metadata["Name"] == distribution
    assert metadata["License-Expression"] == TABLE["license"]
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert TABLE["authors"] in (metadata["Author"], metadata["Author-Email"])
    assert metadata.get_all("Classifier") == TABLE["classifiers"]
    assert metadata["Keywords"].split(",") == sorted(TABLE["keywords"])
    assert f"Homepage, {TABLE['repository']}" in metadata.get_all("Project-URL")


@pytest.mark.parametrize("distribution", MODULES)
def test_wheel_and_sdist_carry_the_licence_and_say_so(distribution, wheelhouse, tmp_path):
    licence = (ROOT / "LICENSE").read_bytes()
    (path,) = wheelhouse.glob(f"{MODULES[distribution]}-*.whl")
    wheel = zipfile.ZipFile(path)
    (information,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert wheel.read(f"{information}/licenses/LICENSE") == licence
    check_metadata(email.message_from_bytes(wheel.read(f"{information}/METADATA")), distribution)

    copy = sdist(ROOT / "packages" / distribution, tmp_path)
    with tarfile.open(copy) as archive:
        top = copy.name.removesuffix(".tar.gz")
        assert archive.extractfile(f"{top}/LICENSE").read() == licence
        check_metadata(email.message_from_bytes(archive.extractfile(f"{top}/PKG-INFO").read()), distribution)


def sdist(package: Path, folder: Path) -> Path:
    """The package's source distribution."""
    code = f"import hatchling.build; print(hatchling.build.build_sdist({str(folder)!r}))"
    done = run(sys.executable, "-c", code, cwd=package)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]
