"""What compiling a CUTLASS kernel takes: the CUDA compiler and CUTLASS's headers.  Nothing here starts CUDA."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

TIMEOUT_S = 10
"""``nvcc --version`` answers in milliseconds; a broken installation must not hang ``qsync doctor``."""


USUAL_PLACES = (Path("/usr/local/cuda/bin/nvcc"),)
"""Where the CUDA toolkit installs itself."""


def find_nvcc() -> Path | None:
    """The CUDA compiler: from ``CUDA_HOME``, from the path, or from its usual place."""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if os.environ.get("CUDA_HOME") else []
    if found := shutil.which("nvcc"):
        candidates.append(Path(found))
    candidates += USUAL_PLACES
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def nvcc_release(nvcc: Path) -> str | None:
    """The release that ``nvcc --version`` reports (``13.0``), or None where it does not run or says something else."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if done.returncode == 0 and match else None


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
