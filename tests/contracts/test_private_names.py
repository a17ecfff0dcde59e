"""PyTorch's private names that the packages use: few, each in one module, and each with what to do about a PyTorch without it."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from contracts.environment import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from structure.private_names import private_uses

MOST = 25
WITHOUT = {
    "_get_backend": "max_ctas_of returns None, and no warning compares a job's CTAs with the plan's.",
    "_get_sequence_number_for_group": "InForce.casts_of shares no casts in a job of several ranks.",
    "_not_supported_under_compile": "Nothing: without it PyTorch refuses no differentiable collective in an export.",
    "_join_config": "Take what torch.distributed.algorithms.join keeps on a Joinable instead.",
    "torch.Tensor._version.__get__": "CastCache.applies_to is False, so that readers of an activation share no cast.",
    "torch.distributed._make_nccl_premul_sum": "weight_gradients takes two passes over all gradients, as over gloo.",
    "torch._C.DisableTorchFunction": "Take DisableTorchFunctionSubclass; modes are then asked about calls inside operators.",
    "torch._C._are_functorch_transforms_active": "apply_of calls function.apply, which asks this itself.",
    "torch._C._autograd._top_saved_tensors_default_hooks": "Collectors refuse an operator that runs in a backward pass.",
    "torch._C._cuda_getCurrentRawStream": "Take torch.cuda.current_stream(device).cuda_stream, which takes ten times as long.",
    "torch._C._current_autograd_node": "Ask _current_graph_task_id, and count steps when any backward pass ends, an inner one too.",
    "torch._C._len_torch_dispatch_stack": "is_plain is False, so that all kernels go through the dispatcher (8 µs a call).",
    "torch._dynamo.backends.common.aot_autograd": "Take functorch.compile.aot_module_simplified with the same compilers.",
    "torch._guards.CompileContext": "Take a graph's meta['dynamo_compile_id'], which DistributedDataParallel's buckets have not.",
    "torch._inductor.compile_fx.compile_fx": "Take torch._dynamo.lookup_backend('inductor') under torch._inductor.config.patch.",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "Give inductor plain functions, with which it stores no compiled graphs.",
    "torch._dynamo.backends.debugging.boxed_nop": "Take functorch.compile.make_boxed_func, which frees activations later.",
    "torch._int_mm": "int8_product computes in float32 pieces everywhere; the backend aten is then slow on GPUs.",
    "torch.autograd.Variable._execution_engine.queue_callback": "Do it in a hook of the last gradient.",
    "torch.cuda._sleep": "A kernel of qsync-kernels-triton or -cutlass that waits for so many cycles.",
    "torch.distributed.distributed_c10d._world.pg_map": "InForce.casts_of shares no casts in a job of several ranks.",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "apply_ takes the wrapper, as weight_gradients does.",
    "torch.overrides._get_current_function_mode_stack": "Leave the warning out that names a script's modes around a model.",
    "torch.utils._python_dispatch.TorchDispatchMode": "Take it from where PyTorch's own FlopCounterMode takes it.",
    "torch.utils._pytree": "Take optree, which has the same functions.",
}
"""What to do about a PyTorch that lacks it."""
SINCE = {"_not_supported_under_compile": (2, 13)}
OF_CUDA = frozenset({"torch._C._cuda_getCurrentRawStream"})
"""What a PyTorch has that is built for CUDA."""


class Wrapper(Joinable):
    """As little as PyTorch asks of what joins."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return None


OWNERS = {
    "_get_backend": lambda: dist.ProcessGroup,
    "_get_sequence_number_for_group": lambda: dist.ProcessGroup,
    "_join_config": Wrapper,
    "_not_supported_under_compile": lambda: importlib.import_module("torch.distributed.nn.functional"),
}


def found(name: str) -> Any:
    """What a name stands for in this PyTorch."""
    if name in OWNERS:
        return getattr(OWNERS[name](), name)
    value: Any = torch
    place = "torch"
    for part in name.split(".")[1:]:
        place = f"{place}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(place)
    return value


def test_the_private_names_are_few_and_known() -> None:
    uses = {use.name for use in private_uses(ROOT)}
    assert uses == set(WITHOUT)
    assert len(uses) <= MOST


def test_each_stands_in_one_module() -> None:
    modules = defaultdict(set)
    for use in private_uses(ROOT):
        modules[use.name].add(use.module)
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}


@pytest.mark.parametrize("name", WITHOUT)
def test_this_pytorch_has(name: str) -> None:
    if name in OF_CUDA and not torch.backends.cuda.is_built():
        pytest.skip("this PyTorch is built without CUDA")
    if (since := SINCE.get(name)) and tuple(map(int, torch.__version__.split(".")[:2])) < since:
        pytest.skip(f"it came with PyTorch {'.'.join(map(str, since))}")
    try:
        found(name)
    except (AttributeError, ImportError) as error:
        raise AssertionError(f"PyTorch {torch.__version__} has no {name}: {WITHOUT[name]}") from error


def test_versions_and_ends_of_join_are_as_they_are_read() -> None:
    x = torch.zeros(2)
    x.add_(1)
    assert found("torch.Tensor._version.__get__")(x) == 1
    assert found("_join_config").enable is False
