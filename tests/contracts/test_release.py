"""What a release changes and what it refuses; building and trying the wheels is ``tox run -e release -- VERSION`` itself."""

from __future__ import annotations

import tomllib
import zipfile

import pytest

import release
import shared_metadata
from contracts.environment import MODULES, ROOT

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


def test_bare_environments_get_every_package():
    assert set(release.ORDER) == {folder.name for folder in shared_metadata.packages(ROOT)}
