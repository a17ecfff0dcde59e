"""Wrappers and compilers around the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qsync_torch import apply_
from robustness.wrong.two import INT8, WIDTH, Pair, Two, one_rank, plan, refused_only, same, script, step


@script()
def ddp_before_apply() -> Pair:
    with one_rank():
        return refused_only(step, lambda: nn.parallel.DistributedDataParallel(Two()))


@script()
def ddp_after_apply() -> Pair:
    model = Two()
    with one_rank():
        apply_(model, plan(), group="infer")
        return step(nn.parallel.DistributedDataParallel(model)), same()[1]


@script()
def data_parallel_before_apply() -> Pair:
    return refused_only(step, lambda: nn.DataParallel(Two()))


@script()
def compiled_before_apply() -> Pair:
    return refused_only(step, lambda: torch.compile(Two(), backend="eager"))


@script()
def compiled_after_apply() -> Pair:
    model = Two()
    apply_(model, plan())
    return step(torch.compile(model, backend="eager")), same()[1]


@script()
def compiled_in_place_before_apply() -> Pair:
    def make() -> Any:
        model = Two()
        model.compile(backend="eager")
        return model

    model = make()
    apply_(model, plan())
    return step(model), same()[1]


@script()
def compiled_part() -> Pair:
    model = Two()
    apply_(model, plan())
    model.a.compile(backend="eager")
    return step(model), same()[1]


@script()
def scripted_model() -> Pair:
    return refused_only(step, lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH))), variants={"0": INT8})
