"""How a plan wants its job to communicate: arguments for DistributedDataParallel, and whether the job was given them.

Another way to communicate changes times and not numbers, so a difference is a warning.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_core.ir.communication import CommunicationSettings
from qsync_core.ir.plan import PrecisionPlan
from qsync_torch.caller import BY_HAND, Caller
from qsync_torch.distributed.nccl import CTA_VARIABLE, max_ctas_of
from qsync_torch.distributed.process_group import rank_count
from qsync_torch.torch_internals import running_wrapper

_MEBIBYTE = 1024 * 1024
_NEW_BUFFERS = "forward_sync_buffers"
BUFFERS = _NEW_BUFFERS if _NEW_BUFFERS in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
"""DistributedDataParallel's name for the broadcast of buffers before a forward; PyTorch 2.13 warns of the older one."""
_START = 'write init_process_group("nccl", pg_options=qsync_torch.process_group_options(plan))'


def ddp_options(plan: PrecisionPlan | None) -> dict[str, Any]:
    """Keyword arguments for DistributedDataParallel; none where the plan says nothing of communication."""
    if plan is None or plan.communication is None:
        return {}
    return options_of(plan.communication.settings)


def options_of(settings: CommunicationSettings) -> dict[str, Any]:
    """Keyword arguments for DistributedDataParallel."""
    cap = {} if settings.bucket_cap_mb is None else {"bucket_cap_mb": settings.bucket_cap_mb}
    return cap | {
        BUFFERS: settings.broadcast_buffers,
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
        "static_graph": settings.static_graph,
    }


def check_communication(plan: PrecisionPlan | None, model: nn.Module, device: torch.device, caller: Caller = BY_HAND) -> bool:
    """Warn where a job of several ranks communicates otherwise than planned; called inside a forward of its model.

    The wrapper is the one whose forward runs now.  Under another kind of data parallelism nothing is compared but said so.

    Returns:
        Whether it communicates as planned, as far as a plan says so.
    """
    if plan is None or plan.communication is None:
        return True
    if rank_count() < 2:
        return True
    wrapper = running_wrapper()
    if wrapper is None or all(module is not model for module in wrapper.module.modules()):
        problems = ["the model does not run in DistributedDataParallel", _wrap(caller)]
    else:
        problems = _differences(plan.communication.settings, wrapper, model, device, caller)
    if problems:
        warnings.warn(f"the plan's times may not hold: {'; '.join(problems)}", stacklevel=2)
    return not problems


def check_reducer() -> None:
    """Refuse gradients that a compiler reduces one by one; called in a forward, also while that is compiled.

    Ranks of unequal precision have unequal backward graphs, so each rank's compiler puts the collectives in an order of its own.

    Raises:
        PlanError: with what to leave out.
    """
    compiler = sys.modules.get("torch._dynamo")  # imported where that reducer was chosen
    if compiler is None or not str(compiler.config.optimize_ddp).startswith("python_reducer"):
        return
    if rank_count() > 1:
        raise PlanError(
            f"torch._dynamo.config.optimize_ddp is {compiler.config.optimize_ddp!r}, so compiled autograd reduces gradients: "
            "ranks under a plan compile different graphs there, whose collectives do not pair; leave it at True"
        )


def _differences(
    planned: CommunicationSettings, wrapper: DistributedDataParallel, model: nn.Module, device: torch.device, caller: Caller
) -> list[str]:
    """What is otherwise, each followed by what to write; empty where nothing is."""
    found = []
    values = [(name, getattr(planned, name), getattr(wrapper, name)) for name in ("gradient_as_bucket_view", "static_graph")]
    if any(True for _ in model.buffers()):
        values.insert(0, (BUFFERS, planned.broadcast_buffers, getattr(wrapper, BUFFERS)))
    if planned.bucket_cap_mb is not None and wrapper.bucket_bytes_cap != int(planned.bucket_cap_mb * _MEBIBYTE):
        values.insert(0, ("bucket_cap_mb", planned.bucket_cap_mb, wrapper.bucket_bytes_cap / _MEBIBYTE))
    other = [(name, wanted, has) for name, wanted, has in values if wanted != has]
    if other:
        wanted = ", ".join(f"{name}={value}" for name, value, _ in other)
        has = ", ".join(f"{name}={value}" for name, _, value in other)
        found += [f"it is for DistributedDataParallel with {wanted}, and this job's has {has}", _wrap(caller)]
    ctas = max_ctas_of(wrapper.process_group, device)
    if ctas is not None and ctas != planned.max_ctas:
        found.append(f"it is for collectives of {_ctas(planned.max_ctas)}, and this job's process group is for {_ctas(ctas)}")
        found.append(f"unset {CTA_VARIABLE}, and {_START}" if os.environ.get(CTA_VARIABLE) else _START)
    return found


def _wrap(caller: Caller) -> str:
    return f"write DistributedDataParallel(model, **applied.ddp_options()), where applied is what {caller.call} returned"


def _ctas(count: int) -> str:
    return f"at most {count} CTAs" if count else "NCCL's own number of CTAs"
