"""S5: 100,000 damaged artifact files of real size.  Each must be refused with an ArtifactError or be a valid artifact.

A valid one (say, another digit in a duration under a matching digest) must encode to exactly the bytes it was read from.  The work
is done in a child process with a memory limit and, for each file, a time limit; a crash of the child, a MemoryError, a timeout and
any other exception count as failures.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from qsync_core.artifacts import files as artifact
from qsync_core.errors import ArtifactError
from results import ROOT, write_rows

sys.path.insert(0, str(ROOT / "packages" / "qsync-core" / "tests"))

from artifact_examples import examples
from artifact_mutations import MUTATIONS, mutate

MEMORY_LIMIT = 400 << 20
"""Address space of the child, in bytes; the interpreter with core and the originals takes about a quarter of it."""
TIME_LIMIT_S = 5
"""For one file; the largest takes about 0.02 s."""


class TooSlowError(Exception):
    """One file took longer than the time limit."""


def _too_slow(number: int, frame: Any) -> None:
    raise TooSlowError


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Damage and read ``count`` files, round robin over the kinds and the mutations; returns what happened."""
    originals = {kind.__name__: artifact.to_bytes(value) for kind, value in examples(layers=12).items()}
    names = list(originals)
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    slowest_s = 0.0
    for number in range(count):
        mutation, resealed = MUTATIONS[number % len(MUTATIONS)]
        name = names[number // len(MUTATIONS) % len(names)]
        while (damaged := mutate(rng, originals[name], mutation, resealed)) == originals[name]:
            pass  # some changes have no effect, such as moving the last entry to the end
        outcomes["resealed" if resealed else "not resealed"] += 1
        start = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
        try:
            value = artifact.from_bytes(damaged)
            if artifact.to_bytes(value) != damaged:
                raise AssertionError("it was read, but is written differently")
            outcomes["valid"] += 1
        except ArtifactError:
            outcomes["refused"] += 1
        except BaseException:  # the very thing that is looked for
            outcomes["failures"] += 1
            failures.append(f"file {number} ({name}, {mutation.__name__}): {traceback.format_exc(limit=-4)}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest_s = max(slowest_s, time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = {name: len(data) for name, data in originals.items()}
    return {"outcomes": outcomes, "failures": failures[:20], "slowest_s": slowest_s, "peak_rss": peak, "sizes": sizes}


def run_limited(count: int, seed: int) -> dict[str, Any]:
    """The same in a child process with limits."""
    command = [sys.executable, __file__, "--child", "--count", str(count), "--seed", str(seed)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    if child.returncode != 0:
        raise SystemExit(f"the child ended with {child.returncode} (a negative number is a signal):\n{child.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def main() -> None:
    """Run, print, and write ``docs/results/spine.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        signal.signal(signal.SIGALRM, _too_slow)
        print(json.dumps(fuzz(options.count, options.seed)))
        return
    found = run_limited(options.count, options.seed)
    outcomes = found["outcomes"]
    print(json.dumps(found, indent=2))
    valid, failed = outcomes.get("valid", 0), outcomes.get("failures", 0)
    detail = (
        f"{outcomes['refused']} refused, {valid} valid and canonical; "
        f"{outcomes['resealed']} with a matching digest; slowest {1e3 * found['slowest_s']:.0f} ms of CPU; address space ≤ 400 MiB"
    )
    if not options.no_write:
        rows = [
            {
                "id": "S5",
                "what": "damaged artifacts read",
                "value": options.count,
                "unit": "files",
                "spread": detail,
                "target": "≥ 100,000",
            },
            {
                "id": "S5b",
                "what": "of them, neither an ArtifactError nor a valid artifact in canonical form",
                "value": failed,
                "unit": "files",
                "target": "0",
            },
        ]
        write_rows("spine", rows, f"python bench/fuzz_artifacts.py --seed {options.seed}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
