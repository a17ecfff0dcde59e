"""S1: how long ``qsync plan`` takes from stored artifacts, process start included, on one core, without torch.

Stored artifacts are a folder with ``dag.qsync``, ``cluster.toml``, ``sensitivity.qsync`` and a ``profile.GROUP.qsync`` per group::

    python bench/plan_time.py bert-base=stored/bert-base resnet50=stored/resnet50

Without arguments, synthetic profiles of BERT-base and ResNet50 are planned (rooflines of V100 and T4; shapes and operator counts
are those of the real models).  The command runs in a fresh virtual environment that holds qsync-core and qsync-planner only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

from results import ROOT, write_rows

CLUSTER = """
name = "two groups"

[[group]]
name = "train"
device = "V100"
count = 2
role = "train"
base = "float32"

[[group]]
name = "infer"
device = "T4"
count = 2
role = "infer"
ladder = ["int8>float32", "float16", "float32"]
memory = "15 GiB"

[[link]]
between = ["train", "infer"]
latency_us = 20
bandwidth_gbps = 32
"""
PROFILE_PREFIX = "profile."


def store_synthetic(folder: Path) -> dict[str, Path]:
    """Write roofline artifacts of BERT-base and ResNet50, as ``name → folder``."""
    sys.path.insert(0, str(ROOT / "packages" / "qsync-planner" / "tests"))
    import synthetic

    from indicator.published import named
    from qsync_core.artifacts.files import digest, save
    from qsync_planner.indicate import indicate

    found = {}
    for name, dag in (("bert-base", synthetic.transformer()), ("resnet50", synthetic.resnet())):
        target = found[name] = folder / name
        target.mkdir()
        save(dag, target / "dag.qsync")
        for group, profile in synthetic.hybrid_profiles(dag).items():
            save(attrs.evolve(profile, dag_digest=digest(dag)), target / f"{PROFILE_PREFIX}{group}.qsync")
        save(indicate(None, dag, synthetic.LADDER, named("random")), target / "sensitivity.qsync")
        (target / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    return found


def environment_without_torch(folder: Path) -> Path:
    """A virtual environment with the planner and what it needs; returns its ``qsync``."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    packages = [str(ROOT / "packages" / name) for name in ("qsync-core", "qsync-planner")]
    constraints = ["-c", str(ROOT / "constraints.txt")] if (ROOT / "constraints.txt").exists() else []
    subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, *packages], check=True)
    torch = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    if torch.returncode == 0:
        raise SystemExit(f"torch can be imported in {folder}, so this would not measure planning without it")
    return folder / "bin" / "qsync"


def plan_seconds(qsync: Path, stored: Path, output: Path) -> float:
    """Wall time of one ``qsync plan``, from process start to process end, on one core."""
    command = [str(qsync), "plan", "--dag", str(stored / "dag.qsync"), "--cluster", str(stored / "cluster.toml")]
    for path in sorted(stored.glob(f"{PROFILE_PREFIX}*.qsync")):
        command += ["--profile", f"{path.name.removeprefix(PROFILE_PREFIX).removesuffix('.qsync')}={path}"]
    command += ["--sensitivity", str(stored / "sensitivity.qsync"), "-o", str(output)]
    core = min(os.sched_getaffinity(0))
    start = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return time.perf_counter() - start


def main() -> None:
    """Measure and write ``docs/results/spine.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stored", nargs="*", metavar="NAME=FOLDER", help="stored artifacts of a model")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--qsync", type=Path, help="an installed qsync command without torch, instead of a fresh environment")
    parser.add_argument("--no-write", action="store_true", help="only print")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stored = {name: Path(path) for name, _, path in (entry.partition("=") for entry in options.stored)}
        source = "stored profiles" if stored else "synthetic profiles"
        stored = stored or store_synthetic(folder)
        qsync = options.qsync or environment_without_torch(folder / "environment")
        rows = []
        for name, path in stored.items():
            plan_seconds(qsync, path, folder / "warm-up.qsync")  # compiles the modules
            times = sorted(plan_seconds(qsync, path, folder / "plan.qsync") for _ in range(options.runs))
            value = round(statistics.median(times), 2)
            what = f"qsync plan for {name}, two groups, one core, no torch, process start included ({source})"
            spread = f"{times[0]:.2f} to {times[-1]:.2f} of {options.runs} runs"
            print(f"S1-{name}: {value} s ({spread})")
            rows.append({"id": f"S1-{name}", "what": what, "value": value, "unit": "s", "spread": spread, "target": "≤ 2"})
        if not options.no_write:
            write_rows("spine", rows, "python bench/plan_time.py " + " ".join(options.stored))


if __name__ == "__main__":
    main()
