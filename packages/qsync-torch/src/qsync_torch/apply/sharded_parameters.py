"""Parameters of which a rank holds a part: what a plan runs with (docs/decisions/sharded-parameters.md).

An operator wants its whole weight as an ordinary tensor.  ``fully_shard`` gathers it so before the part that uses it runs; tensor
parallelism never does, and FullyShardedDataParallel gathers views that a functional call does not find by name.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch.apply.plan_fit import STORED, Addressed
from qsync_torch.caller import BY_HAND, Caller

FLAG = "fully_shard"
"""A flag of ``allow_flags``: weights may be sharded by ``fully_shard`` on GPUs, where that is not tested."""

_FSDP_UNITS = "_is_fsdp_managed_module"
"""PyTorch's own mark of a module whose parameters either kind of FSDP shards."""


def check_whole_model(model: nn.Module) -> None:
    """Refuse FullyShardedDataParallel, around the model, in it, or around what holds it.

    Raises:
        PlanError: with what to use.
    """
    for name, module in model.named_modules():
        if "_fsdp_wrapped_module" in module._modules or _is_flattened(module):
            raise _in_fsdp(f"module {name!r} of this model" if name else "this model")


def check_sharding(addressed: Addressed, device: torch.device, allowed: Collection[str], caller: Caller = BY_HAND) -> None:
    """Refuse weights that operators cannot run with; before a forward, when ``fully_shard`` has not gathered all yet.

    Args:
        addressed: what the plan names.
        allowed: ``allow_flags`` of ``apply_``.

    Raises:
        PlanError: naming an operator.
    """
    for op_id, place in addressed.weights:
        sharded = getattr(place.module, _FSDP_UNITS, False)
        if place.weight is None and STORED in place.module.__dict__:
            continue
        storage = addressed.entries[op_id].variant.storage
        if sharded and storage.is_quantized:
            raise PlanError(
                f"the weight of {op_id.fqn} is sharded by fully_shard, and what a plan stores as {storage} is whole on every rank: "
                f"call {caller.call} before fully_shard, which then shards the others"
            )
        if sharded and not isinstance(place.weight, nn.Parameter):
            raise _in_fsdp(op_id.fqn)  # in whose forward weights are views
        if sharded and device.type != "cpu" and FLAG not in allowed:
            exception = caller.with_option(f"allow_flags=[{FLAG!r}]")
            raise PlanError(
                f"the weight of {op_id.fqn} is sharded by fully_shard, which is tested under a plan on CPUs only: use "
                "DistributedDataParallel with ZeroRedundancyOptimizer; "
                f"{exception} runs it all the same"
            )
        if not sharded and (weight := place.weight) is not None:
            check_ordinary(op_id.fqn, weight)


def check_ordinary(fqn: str, weight: torch.Tensor) -> None:
    """Refuse a weight that is a wrapper around other tensors: a part on each rank, or numbers in another format.

    Raises:
        PlanError: with the class that it has.
    """
    if hasattr(type(weight), "__tensor_flatten__"):
        kind = type(weight).__name__
        why = "tensor parallelism does not go with a plan" if kind == "DTensor" else "its format is not the plan's"
        raise PlanError(f"the weight of {fqn} is a {kind}, and plans are for ordinary float32 tensors: {why}")


def _in_fsdp(what: str) -> PlanError:
    return PlanError(
        f"{what} is in FullyShardedDataParallel, and a plan is for whole parameters: use DistributedDataParallel with "
        "ZeroRedundancyOptimizer"
    )


def _is_flattened(module: nn.Module) -> bool:
    if not getattr(module, _FSDP_UNITS, False):
        return False
    return not getattr(module, "_fsdp_use_orig_params", True) or any(
        getattr(parameter, "_fsdp_flattened", False) for parameter in module.parameters(recurse=False)
    )
