"""What compiling a CUTLASS kernel takes: the CUDA compiler and CUTLASS's headers.  Nothing here starts CUDA."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from qsync_core.errors import BackendError

TIMEOUT_S = 10
"""``nvcc --version`` answers in milliseconds; a broken installation must not hang ``qsync doctor``."""


USUAL_PLACES = (Path("/usr/local/cuda/bin/nvcc"),)
"""Where the CUDA toolkit installs itself."""

GET_HEADERS = "run pip install --no-deps 'nvidia-cutlass>=4.2', or set CUTLASS_PATH to a checkout of CUTLASS"
"""How to get CUTLASS's headers, without the dependencies: CUDA's Python bindings, which compiling does not need."""


def find_nvcc() -> Path | None:
    """The CUDA compiler: from ``CUDA_HOME``, from the path, or from its usual place."""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if os.environ.get("CUDA_HOME") else []
    if found := shutil.which("nvcc"):
        candidates.append(Path(found))
    candidates += USUAL_PLACES
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def _answer(nvcc: Path, question: str) -> str:
    """What the compiler prints to ``--version`` and the like; empty where it does not run, fails or hangs."""
    try:
        done = subprocess.run([nvcc, question], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def nvcc_release(nvcc: Path) -> str | None:
    """The release that ``nvcc --version`` reports (``13.0``), or None where it does not run or says something else."""
    match = re.search(r"release (\d+\.\d+)", _answer(nvcc, "--version"))
    return match[1] if match else None


def find_headers() -> Path | None:
    """The folder with ``cutlass/cutlass.h``: from ``CUTLASS_PATH``, or inside the installed nvidia-cutlass package."""
    roots = [Path(os.environ["CUTLASS_PATH"]) / "include"] if os.environ.get("CUTLASS_PATH") else []
    # The package is found, not imported: importing it would import its own CUDA bindings.
    if spec := importlib.util.find_spec("cutlass_library"):
        roots += [Path(place) / "source" / "include" for place in spec.submodule_search_locations or ()]
    return next((root for root in roots if (root / "cutlass" / "cutlass.h").is_file()), None)


def headers_version(include: Path) -> str:
    """CUTLASS's version as its headers state it (``4.2.0``), or ``unknown``."""
    try:
        text = (include / "cutlass" / "version.h").read_text(errors="replace")
    except OSError:
        return "unknown"
    parts = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else "unknown"


def required() -> tuple[Path, Path]:
    """The compiler and the headers' folder.

    Raises:
        BackendError: when one is missing, with what to install.
    """
    nvcc, include = find_nvcc(), find_headers()
    if nvcc is None:
        raise BackendError("compiling a CUTLASS kernel needs nvcc; install the CUDA toolkit or set CUDA_HOME")
    if include is None:
        raise BackendError(f"compiling a CUTLASS kernel needs CUTLASS's headers; {GET_HEADERS}")
    return nvcc, include


def uncompilable_reason(arch: str) -> str | None:
    """Why nothing can be compiled for an architecture here (compiler or headers missing, or unable to); None where it can."""
    try:
        nvcc, _ = required()
    except BackendError as error:
        return str(error)
    return arch_reason(nvcc, arch)


def arch_reason(nvcc: Path, arch: str) -> str | None:
    """Why the compiler cannot compile for an architecture, None where it can."""
    known = supported_archs(nvcc)
    if arch in known:
        return None
    if not known:
        return f"{nvcc} does not say for which architectures it compiles; reinstall the CUDA toolkit"
    release = nvcc_release(nvcc)
    return f"nvcc {release} does not compile for {arch}, only for {', '.join(known)}; use a CUDA toolkit that does ({nvcc})"


@lru_cache(maxsize=8)
def supported_archs(nvcc: Path) -> tuple[str, ...]:
    """The architectures that ``nvcc --list-gpu-code`` names, and sm_90a where it knows sm_90 (the list omits it)."""
    known = re.findall(r"sm_\d+[a-z]?", _answer(nvcc, "--list-gpu-code"))
    release = nvcc_release(nvcc) or "0.0"
    if "sm_90" in known and tuple(map(int, release.split("."))) >= (12, 0):
        known.append("sm_90a")
    return tuple(dict.fromkeys(known))


@lru_cache(maxsize=8)
def nvcc_build(nvcc: Path) -> str:
    """The compiler's own line about its build, which names it exactly (``cuda_13.0.r13.0/compiler.36424714_0``), or ``unknown``."""
    lines = _answer(nvcc, "--version").split("\n")
    return next((line.removeprefix("Build ").strip() for line in lines if line.startswith("Build ")), "unknown")
