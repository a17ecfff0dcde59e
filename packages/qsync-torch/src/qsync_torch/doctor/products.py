"""What ``qsync doctor`` says of the products of a GPU: right or wrong, under every share (docs/shared-gpus.md#canary)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import torch

from qsync_core.ir.precision import Precision
from qsync_core.kernels.requests import CallShapes
from qsync_core.kernels.support import FIRST_TENSOR_CORES
from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_torch.distributed.ranks import SHARE_VARIABLE
from qsync_torch.kinds.table import OF_ROWS
from qsync_torch.sharing.mps import Daemon
from qsync_torch.sharing.right_shares import probing, wrong_sentences

SHARES = tuple(range(10, 100, 10))
PRECISIONS = (Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16, Precision.INT8)
_SIZES = ((50176, 192, 768), (50176, 768, 192), (4096, 1024, 4096), (8192, 2048, 8192))
"""(M, K, N) of layers of vision models and of language models."""
CALLS = tuple(CallShapes(OF_ROWS.name, (m, k), (n, k), (m, n)) for m, k, n in _SIZES)


def product_lines(daemon: Daemon) -> list[DoctorLine]:
    """Check products on whole GPUs, and on one of each kind under an MPS daemon's shares; no lines without a GPU."""
    if not torch.cuda.is_available():
        return []
    lines: list[DoctorLine] = []
    tried: set[str] = set()
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            here = wrong_sentences(CALLS, formats_of(device), device)
        except RuntimeError:  # the device's own line says what is wrong with it
            continue
        lines += whole_lines(f"cuda:{index}", here)
        name = torch.cuda.get_device_name(device)
        if not daemon.problem and not os.environ.get(SHARE_VARIABLE) and name not in tried:
            tried.add(name)
            with probing(CALLS, formats_of(device), device) as probe:
                lines += share_lines(f"cuda:{index}", probe(SHARES))
    return lines


def formats_of(device: torch.device) -> tuple[Precision, ...]:
    """List the formats that the device has in hardware; backends refuse others."""
    capability = torch.cuda.get_device_capability(device)
    return tuple(p for p in PRECISIONS if p is Precision.FLOAT32 or capability >= FIRST_TENSOR_CORES[p])


def whole_lines(topic: str, wrong: Sequence[str]) -> Iterator[DoctorLine]:
    """Say whether products are right on a GPU as this process has it."""
    if not wrong:
        yield DoctorLine(f"{topic} products", "right, compared with exact ones")
        return
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    advice = "install other versions of torch, CUDA and the driver, or another share; 'qsync profile' leaves out what is wrong"
    yield DoctorLine(f"{topic} products", f"wrong: {wrong[0]}{more}", Status.ERROR, advice)


def share_lines(topic: str, found: Mapping[int, str | None]) -> Iterator[DoctorLine]:
    """Say under which shares of a GPU products are right; ``found`` has what is wrong, by the share in percent."""
    right = [share for share, wrong in found.items() if wrong == ""]
    wrong = {share: said for share, said in found.items() if said}
    if wrong:
        first = next(iter(wrong))
        yield DoctorLine(
            f"{topic} shares",
            f"products are wrong at {_percent(wrong)}, right at {_percent(right)}; at {first}%: {wrong[first]}",
            Status.WARNING,
            "give groups a share that is right (docs/shared-gpus.md#canary)",
        )
    elif right:
        yield DoctorLine(f"{topic} shares", f"products are right at {_percent(right)}")
    if unknown := [share for share, said in found.items() if said is None]:
        yield DoctorLine(f"{topic} shares", f"no process could be tried at {_percent(unknown)}", Status.INFO)


def _percent(shares: Sequence[int] | Mapping[int, str]) -> str:
    return f"{', '.join(map(str, shares))}%" if shares else "none that was tried"
