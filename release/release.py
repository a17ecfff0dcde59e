"""A release in one command, up to the point where a person publishes it: ``tox run -e release -- 0.1.0``.

Sets the version of the five packages (and what they ask of each other), dates its section of each changelog, builds a wheel and an
sdist of each into ``dist/``, and tries them in a bare environment: qsync-core and qsync-planner as a laptop installs them, then all
five without torch.  It writes the archives' SHA-256 beside them, and commits, tags and uploads nothing.

With ``--check`` it changes nothing in the repository: versions and changelogs must be as the release needs them.
"""

from __future__ import annotations

import argparse
import datetime
import email
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import shared_metadata

ROOT = Path(__file__).parents[1]
NEEDS_TORCH = "qsync-torch"
"""Installed beside the others without what it depends on; each of these with all of it."""
ORDER = ("qsync-core", "qsync-planner", "qsync-kernels-cutlass", "qsync-kernels-triton", NEEDS_TORCH)
"""In which they are installed, each tried before the next."""


HASHES = "SHA256SUMS"
"""The file beside the archives that ``sha256sum --check`` reads."""


class NotReadyError(Exception):
    """Why there is no release, in one sentence."""


def with_version(pyproject: str, version: str) -> str:
    """A pyproject.toml with that version, which asks other QSync packages for the same release series."""
    major, minor, _ = map(int, version.split("."))
    series = f">={major}.{minor},<{major}.{minor + 1}"
    text = re.sub(r'(?m)^version = "[^"]*"$', f'version = "{version}"', pyproject, count=1)
    return re.sub(r'"(qsync-[\w-]+(?:\[[\w,-]+\])?)>=[^"]*"', rf'"\1{series}"', text)


def with_release(changelog: str, version: str, date: str) -> str:
    """A changelog whose section ``## VERSION (unreleased)``, or ``## Unreleased``, is that version's of that date.

    Raises:
        NotReadyError: when there is no such section, or nothing in it.
    """
    heading = rf"(?m)^## (?:{re.escape(version)}(?: \((?:unreleased|[\d-]+)\))?|Unreleased)$"
    found = list(re.finditer(heading, changelog))
    if len(found) != 1:
        count = f"{len(found)} sections" if found else "no section"
        raise NotReadyError(f"has {count} '## {version} (unreleased)'; write one, with a line per change")
    section = changelog[found[0].end() :].split("\n## ", 1)[0]
    if not re.search(r"(?m)^- \S", section):
        raise NotReadyError(f"has nothing in its section {version}; write a line per change")
    if re.search(r"\(\d{4}-\d\d-\d\d\)$", found[0][0]):
        return changelog
    return changelog[: found[0].start()] + f"## {version} ({date})" + changelog[found[0].end() :]


def prepared(root: Path, version: str, date: str) -> dict[Path, str]:
    """Every file that a release touches, as the release has it.

    Raises:
        NotReadyError: when the version is no version or a changelog says nothing of it.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise NotReadyError(f"{version!r} is no version; write three numbers, such as 0.1.0")
    files = shared_metadata.written(root)
    for folder in shared_metadata.packages(root):
        files[folder / "pyproject.toml"] = with_version(files[folder / "pyproject.toml"], version)
        path = folder / "CHANGELOG.md"
        try:
            files[path] = with_release(path.read_text(), version, date)
        except NotReadyError as error:
            raise NotReadyError(f"{path.relative_to(root)} {error}") from None
    return files


def run(*command: object, cwd: Path) -> str:
    """The output of a command.

    Raises:
        NotReadyError: when it fails, with what it wrote.
    """
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReadyError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(root: Path, folder: Path) -> list[Path]:
    """A wheel and an sdist of each package; the wheel is built from the sdist, so the sdist has all that it takes."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in shared_metadata.packages(root):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, package, cwd=root)
        print("built", package.name)
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])


def write_hashes(archives: Iterable[Path]) -> Path:
    """Write the SHA-256 of archives of one folder beside them, for ``sha256sum --check``."""
    lines = {path: f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(archives)}
    (folder,) = {path.parent for path in lines}
    found = folder / HASHES
    found.write_text("".join(lines.values()))
    return found


def check_archive(path: Path, version: str, licence: bytes) -> None:
    """The archive says the version and carries the licence.

    Raises:
        NotReadyError: when it does not.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(("/METADATA", "/LICENSE"))}
    else:
        with tarfile.open(path) as sdist:
            wanted = [member for member in sdist if member.name.endswith(("/PKG-INFO", "/LICENSE"))]
            contents = {member.name: sdist.extractfile(member).read() for member in wanted}
    metadata = [email.message_from_bytes(text) for name, text in contents.items() if name.endswith(("/METADATA", "/PKG-INFO"))]
    found = [message["Version"] for message in metadata]
    if found != [version]:
        raise NotReadyError(f"{path.name} says that it is version {', '.join(found) or 'none'}, not {version}")
    if licence not in contents.values():
        raise NotReadyError(f"{path.name} does not carry LICENSE")


def try_out(wheels: Path, names: Iterable[str], version: str, root: Path) -> None:
    """Install the wheels into bare environments, and ask the command for its version and for the plugins that it finds.

    Raises:
        NotReadyError: when one does not install, or does not work.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        programs = folder / "venv" / "bin"
        install = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-compile"]
        install += ["--find-links", wheels, "-c", root / "constraints.txt"]
        installed: list[str] = []
        for distribution in sorted(names, key=ORDER.index):
            options = ["--no-deps"] if distribution == NEEDS_TORCH else []
            run(*install, *options, f"{distribution}=={version}", cwd=folder)
            installed.append(distribution)
            said = run(programs / "qsync", "--version", cwd=folder)
            if version not in said:
                raise NotReadyError(f"qsync --version of the installed wheels says {said.strip()!r}, not {version}")
            if distribution == NEEDS_TORCH:
                # Torch is not here, as `qsync doctor` would rightly complain; definitions of commands do without it.
                run(programs / "qsync", "trace", "--help", cwd=folder)
            else:
                report = run(programs / "qsync", "doctor", "--json", cwd=folder)
                topics = {line["topic"] for line in json.loads(report)["lines"]}
                if missing := [found for found in installed if found not in topics]:
                    raise NotReadyError(f"qsync doctor does not list {', '.join(missing)}; installed are {', '.join(installed)}")
            print("works in a bare environment:", ", ".join(installed))


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__.split("\n", 1)[0])
    parser.add_argument("version", help="of all five packages, such as 0.1.0")
    parser.add_argument("--check", action="store_true", help="change nothing in the repository; what is not ready is an error")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="of the changelogs' sections [today]")
    chosen = parser.parse_args(arguments)
    dist = ROOT / "dist"
    try:
        for path, text in prepared(ROOT, chosen.version, chosen.date).items():
            if path.exists() and path.read_text() == text:
                continue
            if not chosen.check:
                path.write_text(text)
                print("wrote", path.relative_to(ROOT))
            elif path.name == "pyproject.toml":
                raise NotReadyError(f"{path.relative_to(ROOT)} is not that of {chosen.version}; run this without --check")
        names = [folder.name for folder in shared_metadata.packages(ROOT)]
        archives = build(ROOT, dist)
        if len(archives) != 2 * len(names):
            raise NotReadyError(f"{dist} holds {len(archives)} archives, not a wheel and an sdist of each of {len(names)} packages")
        for archive in archives:
            check_archive(archive, chosen.version, (ROOT / "LICENSE").read_bytes())
        print(run(sys.executable, "-m", "twine", "check", "--strict", *archives, cwd=ROOT).strip())
        try_out(dist, names, chosen.version, ROOT)
        write_hashes(archives)
    except NotReadyError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(f"\n{len(archives)} archives of {chosen.version} and their {HASHES} are in {dist}.  Nothing is published.  What is left:")
    print(f"  git commit -am 'Release {chosen.version}' && git tag v{chosen.version}")
    print("  python -m twine upload dist/*.whl dist/*.tar.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
