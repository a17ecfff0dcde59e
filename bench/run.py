"""What ``tox run -e benchmark`` runs: ``spine`` (the main job on a CPU), ``structure``, ``allocator``, ``indicator``, ``accuracy``,
``kernels``.

Without arguments it is all but ``accuracy``, which trains for an hour and a half on two cores.

    tox run -e benchmark -- spine
    tox run -e benchmark -- structure --list
    tox run -e benchmark -- allocator --only A1,A2
    tox run -e benchmark -- indicator --jobs 9
    tox run -e benchmark -- accuracy --save runs --jobs 16
    tox run -e benchmark -- kernels --set bert-base --compare earlier.json

What follows ``structure`` goes to ``structure.py``, what follows ``allocator`` to ``allocator_rows.py``, what follows
``indicator`` to ``indicator_rows.py``, what follows ``accuracy`` to ``accuracy.py``, and what follows ``kernels`` to pytest.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPINE = (
    "import_core.py",
    "plan_time.py bert-base=tests/data/h200/bert-base resnet50=tests/data/h200/resnet50",
    "fuzz_artifacts.py",
    "profile_time.py --threads 1",
    "demo_spine.py --runs 3",
)


def commands(arguments: list[str]) -> list[list[str]]:
    """Command lines of what is asked for.

    Raises:
        SystemExit: when the first argument names no part.
    """
    spine = [[sys.executable, f"bench/{script}", *rest] for script, *rest in map(shlex.split, SPINE)]
    structure = [sys.executable, "bench/structure.py"]
    allocator = [sys.executable, "bench/allocator_rows.py"]
    indicator = [sys.executable, "bench/indicator_rows.py"]
    accuracy = [sys.executable, "bench/accuracy.py"]
    kernels = [sys.executable, "-m", "pytest", "bench/kernels"]
    match arguments:
        case []:
            return [*spine, structure, allocator, indicator, kernels]
        case ["spine"]:
            return spine
        case ["structure", *rest]:
            return [[*structure, *rest]]
        case ["allocator", *rest]:
            return [[*allocator, *rest]]
        case ["indicator", *rest]:
            return [[*indicator, *rest]]
        case ["accuracy", *rest]:
            return [[*accuracy, *rest]]
        case ["kernels", *rest]:
            return [[*kernels, *rest]]
    raise SystemExit(
        f"benchmarks are 'spine', 'structure', 'allocator', 'indicator', 'accuracy' and 'kernels', got {arguments[0]!r}; "
        "'spine' takes no arguments"
    )


if __name__ == "__main__":
    for command in commands(sys.argv[1:]):
        print("+", *command[1:], flush=True)
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            raise SystemExit(status)
