"""Row S14: what quantization costs with the checksum of its data, over what it costs without, on a GPU.

    python bench/kernels/checksum_cost.py --before TREE [--rounds 7] [--out FOLDER]

TREE is a checkout of the last commit whose kernels take no checksum (``git worktree add TREE COMMIT``).  The Triton quantizer of
each tree runs in processes that take turns on one GPU, on rows K4's shape and on others that a step has: weights with a scale a
channel, activations with a scale a row, a transposed copy; each in its first candidate's configuration, and in its fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import write_rows

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, tuple[tuple[int, ...], str, bool]] = {
    "512x64x56x56 per tensor (K4)": ((512, 64, 56, 56), "tensor", False),
    "64x64x56x56 per tensor": ((64, 64, 56, 56), "tensor", False),
    "4096x4096 per tensor, transposed": ((4096, 4096), "tensor", True),
    "4096x4096 per row": ((4096, 4096), "row", False),
    "1024x512x3x3 per channel": ((1024, 512, 3, 3), "channel", False),
    "64x64x1x1 per channel": ((64, 64, 1, 1), "channel", False),
}
_BYTES = 512 << 20
"""Of operands that take turns: more than a cache holds."""


def measure(source: str) -> dict[str, list[float]]:
    """Nanoseconds of a call with each case's candidates, with the packages of the present process."""
    import torch

    from qsync_core.ir.precision import Granularity, Precision, Rounding
    from qsync_core.kernels.backend import KernelRequest, Op
    from qsync_core.kernels.requests import OperatorRequest, quantization_variant
    from qsync_kernels_triton.backend import TritonBackend
    from qsync_torch.kernels.operands import make_operands

    device, found = torch.device("cuda"), {}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    for name, (shape, granularity, transposed) in CASES.items():
        variant = quantization_variant(Precision.INT8, Granularity(granularity), Rounding.STOCHASTIC, True)
        request = KernelRequest(
            Op.QUANTIZE, variant, (shape,), device_kind="cuda", compute_capability=capability, transposed=transposed
        )
        asked = OperatorRequest(Op.QUANTIZE, request, shape, Precision(source))
        count = max(2, min(64, _BYTES // (torch.Size(shape).numel() * Precision(source).nbytes)))
        sets = [make_operands(asked, device) for _ in range(count)]
        backend, times = TritonBackend(), []
        for config in backend.candidate_configs(request):
            kernel = backend.build(request, config)
            for arguments in sets:
                kernel(*arguments)
            times.append(_time(kernel, sets))
        found[name] = times
    return found


def _time(kernel: Any, sets: Sequence[tuple[Any, ...]]) -> float:
    """The median over series, captured so that launching on the host has no part in it."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            kernel(*arguments)
    samples = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e6 / len(sets))
    return statistics.median(samples)


def in_tree(tree: Path, source: str) -> dict[str, list[float]]:
    """The same in a process of its own, with the packages of a checkout."""
    packages = ("core", "planner", "torch", "kernels-triton", "kernels-cutlass")
    own = [str(tree / "packages" / f"qsync-{name}" / "src") for name in packages]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])  # where what is installed may lie
    command = [sys.executable, __file__, "--child", source]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout without checksums")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--source", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results file (docs/results)")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measure(asked.child)))
        return
    if asked.before is None:
        parser.error("--before TREE is needed: the last checkout whose kernels take no checksum")
    rounds = [(in_tree(asked.before, asked.source), in_tree(ROOT, asked.source)) for _ in range(asked.rounds)]
    rows = []
    for number, name in enumerate(CASES):
        for what, pick in (("first candidate", lambda times: times[0]), ("fastest", min)):
            ratios = [pick(after[name]) / pick(before[name]) for before, after in rounds]
            now = statistics.median(pick(after[name]) for _, after in rounds)
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"S14  {asked.source} {name}, {what}: {statistics.median(ratios):.3f} ({spread}; {now / 1e3:.1f} us)", flush=True)
        row = {  # of the fastest configuration, which is what a tuned job runs
            "id": f"S14-{number}" if number else "S14",
            "what": f"quantize {asked.source} {name} to int8, stochastic, triton: time with the checksum over without",
            "value": round(statistics.median(ratios), 4),
            "unit": "ratio",
            "spread": f"{spread} of {asked.rounds} turns; {now / 1e3:.1f} µs with it",
            "target": "reported" if number else "≤ 1.03",
            "device": device_name(),
        }
        rows.append(row)
    command = f"python bench/kernels/checksum_cost.py --before TREE --rounds {asked.rounds}"
    print(f"wrote {write_rows('structure', rows, command, directory=asked.out)}")


def device_name() -> str:
    """The GPU's."""
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
