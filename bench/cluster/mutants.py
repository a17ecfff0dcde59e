"""Row C11 of ``docs/results/cluster.json``: wrong kernel backends that the conformance suite finds, of all that there are.

    python bench/cluster/mutants.py [--out FOLDER]

Each is the reference backend with one mistake of a kind that real kernels have (``packages/qsync-torch/tests/conformance``).  The
reference itself must pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import ROOT, parser_of, write_rows

MODULE = "address_mutants"
"""Holds those that keep numbers by address, and maxima that leave out an edge."""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A Python process on CPUs that finds the mutants."""
    tests = str(ROOT / "packages" / "qsync-torch" / "tests")
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main() -> None:
    """Put the reference and every mutant to the suite, and write the row."""
    parser = parser_of(__doc__)
    options = parser.parse_args()
    suite = "qsync_torch.conformance"
    started = time.perf_counter()
    reference = run("-m", "pytest", "-q", "-p", f"{suite}.plugin", "--pyargs", suite, "--backend", "aten")
    seconds = time.perf_counter() - started
    if reference.returncode:
        raise SystemExit(f"the reference backend fails the suite:\n{reference.stdout[-3000:]}{reference.stderr[-1000:]}")
    found = run("-m", "conformance.run_mutants")
    if found.returncode:
        raise SystemExit(f"the mutants could not be put to the suite:\n{found.stderr[-3000:]}")
    names = run("-c", f"from conformance.{MODULE} import ALL; print(*[one.__name__ for one in ALL])").stdout.split()
    verdicts = json.loads(found.stdout.splitlines()[-1])
    survived = [name for name, (code, *_) in verdicts.items() if code != 1]
    killed = len(verdicts) - len(survived)
    of_kind = sum(name not in survived for name in names)
    row = {
        "id": "C11",
        "what": f"conformance: wrong backends found, {killed} of {len(verdicts)}; survived: {', '.join(survived) or 'none'}",
        "value": killed / len(verdicts),
        "unit": "fraction",
        "spread": f"{of_kind} of {len(names)} that keep numbers by address or leave out an edge; the suite takes {seconds:.0f} s",
        "target": "all",
    }
    print(f"C11: {row['value']:.4f} ({row['what']}; {row['spread']})")
    print(f"wrote {write_rows('cluster', [row], 'python bench/cluster/mutants.py', directory=options.out)}")


if __name__ == "__main__":
    main()
