"""Whether all ranks of a job hold the same plan and compatible versions: asked once, before the first step.

Ranks exchange fixed-size digests, so that a rank with another plan can not make the exchange itself hang or fail, and every rank
raises the same error instead of waiting for one that gave up.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import torch
import torch.distributed as dist

from qsync_core.artifact import digest
from qsync_core.errors import CompatibilityError, PlanError
from qsync_core.plan import PrecisionPlan

_DIGEST_BYTES = 32
_PACKAGES = ("qsync-core", "qsync-torch")


def versions_text() -> str:
    """The versions that ranks must share."""
    return ", ".join(f"{name} {version(name)}" for name in _PACKAGES)


def _gather(text_digest: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    mine = torch.tensor(list(text_digest), dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(entry.tolist()) for entry in everyone]


def _describe(digests: list[bytes]) -> str:
    ranks: dict[bytes, list[str]] = {}
    for rank, entry in enumerate(digests):
        ranks.setdefault(entry, []).append(str(rank))
    return "; ".join(f"{entry.hex()[:12]} on rank{'s' if len(who) > 1 else ''} {', '.join(who)}" for entry, who in ranks.items())


def check_ranks_agree(plan: PrecisionPlan, group: dist.ProcessGroup | None = None) -> None:
    """Compare plan and versions across ranks; call it on every rank after ``init_process_group`` and before the first step.

    Args:
        plan: the plan this rank applies.
        group: the ranks to compare, all by default.

    Raises:
        CompatibilityError: on every rank, when versions differ.
        PlanError: on every rank, when plans differ.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = hashlib.sha256(versions_text().encode()).digest() + bytes.fromhex(digest(plan))
    gathered = _gather(mine, group)
    software = [entry[:_DIGEST_BYTES] for entry in gathered]
    plans = [entry[_DIGEST_BYTES:] for entry in gathered]
    if len(set(software)) > 1:
        raise CompatibilityError(
            f"the ranks of this job run different versions of QSync (digests {_describe(software)}); "
            f"this rank has {versions_text()}: install the same on all"
        )
    if len(set(plans)) > 1:
        raise PlanError(
            f"the ranks of this job hold different plans (digests {_describe(plans)}); give every rank the same plan file"
        )
