"""What a release changes and what it refuses; building and trying the wheels is ``tox run -e release -- VERSION`` itself."""

from __future__ import annotations

import re
import subprocess
import tomllib
import zipfile

import pytest
import yaml

import release
import shared_metadata
from contracts.environment import MODULES, ROOT
from contracts.test_readme_commands import tox_section

CHANGELOG = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- A change.\n\n## 0.1.0 (2025-01-02)\n\n- First.\n"


@pytest.fixture
def repository(tmp_path):
    """The files that a release reads."""
    names = ["pyproject.toml", "LICENSE", "SECURITY.md"]
    names += [
        f"packages/{package}/{name}" for package in MODULES for name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md")
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_versions_requirements_and_changelogs_of_all_packages_change_together(repository):
    for package in MODULES:
        (repository / "packages" / package / "CHANGELOG.md").write_text(CHANGELOG)
    files = release.prepared(repository, "0.2.0", "2026-03-04")
    for package in MODULES:
        project = tomllib.loads(files[repository / "packages" / package / "pyproject.toml"])["project"]
        assert project["version"] == "0.2.0"
        extras = [need for needs in project.get("optional-dependencies", {}).values() for need in needs]
        siblings = [need for need in [*project["dependencies"], *extras] if need.startswith("qsync-")]
        assert all(need.endswith(">=0.2,<0.3") for need in siblings), siblings
        assert bool(siblings) == (package != "qsync-core")
        changelog = files[repository / "packages" / package / "CHANGELOG.md"]
        assert changelog == CHANGELOG.replace("(unreleased)", "(2026-03-04)")


def test_the_repository_is_ready_for_its_own_version(repository):
    version = tomllib.loads((ROOT / "packages/qsync-core/pyproject.toml").read_text())["project"]["version"]
    changed = {path.name for path, text in release.prepared(repository, version, "2026-03-04").items() if path.read_text() != text}
    assert changed == {"CHANGELOG.md"}


@pytest.mark.parametrize(
    ("changelog", "facts"),
    [
        ("# Changelog\n\n## 0.1.0 (2025-01-02)\n\n- First.\n", ["no section", "0.2.0"]),
        ("# Changelog\n\n## 0.2.0 (unreleased)\n\n## 0.1.0 (2025-01-02)\n\n- First.\n", ["nothing", "0.2.0"]),
        ("# Changelog\n\n## 0.2.0 (unreleased)\n\n- A.\n\n## Unreleased\n\n- B.\n", ["2 sections"]),
    ],
    ids=["no section", "an empty section", "two sections"],
)
def test_a_changelog_that_does_not_tell_the_version_stops_the_release(repository, changelog, facts):
    (repository / "packages" / "qsync-torch" / "CHANGELOG.md").write_text(changelog)
    for package in set(MODULES) - {"qsync-torch"}:
        (repository / "packages" / package / "CHANGELOG.md").write_text(CHANGELOG)
    with pytest.raises(release.NotReadyError) as error:
        release.prepared(repository, "0.2.0", "2026-03-04")
    assert all(fact in str(error.value) for fact in ["packages/qsync-torch/CHANGELOG.md", *facts])


def test_unreleased_becomes_the_version_and_a_released_section_stays():
    assert release.with_release("## Unreleased\n\n- A.\n", "0.3.0", "2026-03-04") == "## 0.3.0 (2026-03-04)\n\n- A.\n"
    assert release.with_release(CHANGELOG, "0.1.0", "2026-03-04") == CHANGELOG


@pytest.mark.parametrize("version", ["0.1", "v0.1.0", "0.1.0rc1", ""])
def test_what_is_no_version_is_refused(repository, version):
    with pytest.raises(release.NotReadyError, match=r"three numbers"):
        release.prepared(repository, version, "2026-03-04")


def test_an_archive_of_another_version_or_without_the_licence_is_refused(wheelhouse, tmp_path):
    (wheel,) = wheelhouse.glob("qsync_core-*.whl")
    licence, version = (ROOT / "LICENSE").read_bytes(), wheel.name.split("-")[1]
    release.check_archive(wheel, version, licence)
    with pytest.raises(release.NotReadyError, match=r"9\.9\.9"):
        release.check_archive(wheel, "9.9.9", licence)
    bare = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(bare, "w") as part:
        for name in whole.namelist():
            if not name.endswith("/LICENSE"):
                part.writestr(name, whole.read(name))
    with pytest.raises(release.NotReadyError, match="LICENSE"):
        release.check_archive(bare, version, licence)


def test_hashes_are_those_that_sha256sum_checks(tmp_path):
    for name in ("b-1.0.tar.gz", "a-1.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(name.encode())
    written = release.write_hashes(tmp_path.glob("*-1.0*"))
    assert [line.split("  ")[1] for line in written.read_text().splitlines()] == ["a-1.0-py3-none-any.whl", "b-1.0.tar.gz"]
    check = ["sha256sum", "--check", "--strict", written.name]
    assert subprocess.run(check, cwd=tmp_path, check=False, capture_output=True).returncode == 0
    (tmp_path / "b-1.0.tar.gz").write_bytes(b"altered")
    assert subprocess.run(check, cwd=tmp_path, check=False, capture_output=True).returncode == 1


def test_tools_of_a_release_are_pinned_by_hash():
    wanted = [line.split(">=")[0] for line in (ROOT / "release" / "requirements.in").read_text().splitlines() if line[0] != "#"]
    text = (ROOT / "release" / "requirements.txt").read_text()
    pinned = re.split(r"(?m)^(?=[a-z0-9])", re.sub(r"(?m)^ *#.*\n", "", text))[1:]
    assert {re.split("[= ;]", entry)[0] for entry in pinned} >= set(wanted)
    for entry in pinned:
        assert re.match(r"[\w.-]+==[\w.]+ ", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    environment = tox_section("testenv:release")
    assert environment["deps"] == "-r {tox_root}/release/requirements.txt"
    assert "--require-hashes" in environment["install_command"]


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow):
    text = workflow.read_text()
    used = re.findall(r"uses: *(\S+.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_the_release_workflow_builds_with_pinned_tools_and_attests_what_it_built():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"].values()
    assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert "--require-hashes -r release/requirements.txt" in commands[0]
    assert "release/release.py" in commands[1]
    assert commands[1].endswith("--check")
    actions = [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step]
    assert actions[-2:] == ["actions/attest-build-provenance", "actions/upload-artifact"]
    attested = next(step for step in job["steps"] if "attest" in step.get("uses", ""))["with"]["subject-path"].split()
    assert attested == ["dist/*.whl", "dist/*.tar.gz", f"dist/{release.HASHES}"]


def test_bare_environments_get_every_package():
    assert set(release.ORDER) == {folder.name for folder in shared_metadata.packages(ROOT)}
