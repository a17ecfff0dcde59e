"""Which QSync packages work together: those of one release series (0.1.x, later 1.x)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

from qsync_core.errors import CompatibilityError

PACKAGES = ("qsync-core", "qsync-planner", "qsync-torch", "qsync-kernels-triton", "qsync-kernels-cutlass")


def series(version: str) -> str:
    """The part of a version that must be equal: ``0.1`` of 0.1.7, ``2`` of 2.3.0.

    Raises:
        CompatibilityError: when the text is no version.
    """
    match = re.match(r"(\d+)\.(\d+)", version, re.ASCII)
    if match is None:
        raise CompatibilityError(f"{version!r} is not a version of a QSync package; install it again")
    major, minor = match.groups()
    return f"{major}.{minor}" if major == "0" else major


def installed_versions() -> dict[str, str]:
    """Version of every installed QSync package, by distribution name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_versions(versions: Mapping[str, str]) -> None:
    """Refuse packages of different release series.

    Args:
        versions: by distribution name, qsync-core among them.

    Raises:
        CompatibilityError: naming the package that does not fit, both versions, and the command that helps.
    """
    core = versions["qsync-core"]
    for name, version in versions.items():
        if series(version) != series(core):
            raise CompatibilityError(
                f"{name} {version} does not work with qsync-core {core}: all QSync packages must be of one series; "
                f"install the same one, for example: pip install 'qsync-core=={series(core)}.*' '{name}=={series(core)}.*'"
            )


def check_installed(distribution: str | None = None) -> None:
    """Refuse to work with incompatible QSync packages.

    Args:
        distribution: check only this package against qsync-core, when that package is imported; None checks all.

    Raises:
        CompatibilityError: as :func:`check_versions`.
    """
    versions = installed_versions()
    if distribution is not None:
        versions = {name: version for name, version in versions.items() if name in ("qsync-core", distribution)}
    if "qsync-core" in versions:  # not installed at all only where the sources are put on the path by hand
        check_versions(versions)
