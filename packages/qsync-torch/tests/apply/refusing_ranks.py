"""What one of three ranks runs, over gloo: cases in which another rank is wrong; prints as JSON what each case raised here.

``python refusing_ranks.py RANK FOLDER`` runs all cases of :data:`CASES`, each in a process group of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import nn

from qsync_core.artifacts.files import save
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch import InStepGradScaler, apply_
from qsync_torch.apply import planned_model as applying
from qsync_torch.distributed import ranks
from qsync_torch.distributed.ranks import device_name, together

WORLD_SIZE = 3
TIMEOUT_S = 10
LONGER_S = TIMEOUT_S + 5
"""How long the culprit takes where it takes longer than that."""
GROUP_TIMEOUT_S = LONGER_S + TIMEOUT_S
"""What bounds slow work, and a collective that the others have left: well above what the culprit takes, on a busy machine too."""
CULPRIT = 1
"""The rank that is wrong, where one is."""


def plan_of(fqn: str = "0", backend: str = "aten", on_gpus: bool = False) -> PrecisionPlan:
    op_id = OpId(fqn)

    def group(name: str, role: Role, variant: Variant, backend: str) -> GroupPlan:
        device = DeviceType(*(device_name() if on_gpus else ("cpu", DeviceKind.CPU)))
        return GroupPlan(name, role, 2, device, Precision.FLOAT32, {op_id: Assignment(variant, backend, "", "by hand")})

    train = group("train", Role.TRAIN, Variant.of(Precision.FLOAT32), "aten")
    infer = group("infer", Role.INFER, Variant.of(Precision.BFLOAT16), backend)
    return PrecisionPlan(
        "m", "", (op_id,), {}, "by hand", "", 1, 1, 0.0, None, (train, infer), "train", output_formats=OutputFormats(decides=False)
    )


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4))


def group_of(rank: int) -> str:
    return "infer" if rank == CULPRIT else "train"


def agreed(rank: int, folder: Path) -> str:
    """Twice on one model, once on a second one, under a path and as a plan; the store does not grow."""
    save(plan_of(), folder / f"agreed{rank}.qsync")
    first, second = model(), model()
    store = dist.group.WORLD.get_group_store()
    sizes = []
    for _ in range(3):
        applied = apply_(first, folder / f"agreed{rank}.qsync", group=group_of(rank))
        dist.barrier()
        sizes.append(store.num_keys())
        dist.barrier()
        applied.remove()
    apply_(second, plan_of(), group=group_of(rank))
    apply_(first, plan_of(), group=group_of(rank))
    dist.barrier()
    return f"keys {sizes[-1] - sizes[1]}"


def wrong_group(rank: int, folder: Path) -> None:
    os.environ["QSYNC_GROUP"] = "inference" if rank == CULPRIT else "train"
    apply_(model(), plan_of())


def no_plan_file(rank: int, folder: Path) -> None:
    if rank != CULPRIT:
        save(plan_of(), folder / f"kept{rank}.qsync")
    apply_(model(), folder / f"kept{rank}.qsync", group="train")


def other_model(rank: int, folder: Path) -> None:
    apply_(nn.Sequential(nn.ReLU()) if rank == CULPRIT else model(), plan_of(), group=group_of(rank))


def missing_backend(rank: int, folder: Path) -> None:
    apply_(model(), plan_of(backend="nowhere"), group=group_of(rank))


def other_plan(rank: int, folder: Path) -> None:
    apply_(model(), attrs.evolve(plan_of(), notes=("other",)) if rank == CULPRIT else plan_of(), group="train")


def other_parameters(rank: int, folder: Path) -> None:
    """As adapters of another rank are, which the plan says nothing of."""
    apply_(nn.Sequential(*model(), nn.PReLU(2 if rank == CULPRIT else 4)), plan_of(), group=group_of(rank))


def local_parameters(rank: int, folder: Path) -> None:
    """Which DistributedDataParallel leaves to the ranks."""
    whole = nn.Sequential(*model(), nn.PReLU(2 if rank == CULPRIT else 4))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, [f"{len(whole) - 1}.weight"])
    apply_(whole, plan_of(), group=group_of(rank))


def other_formats(rank: int, folder: Path) -> None:
    """Of a parameter that DistributedDataParallel broadcasts, whose formats it does not compare."""
    embedding = nn.Embedding(3, 4, dtype=torch.bfloat16 if rank == CULPRIT else None).requires_grad_(False)
    apply_(nn.Sequential(*model(), embedding), plan_of(), group=group_of(rank))


def other_versions(rank: int, folder: Path) -> None:
    kept = ranks.versions_text
    ranks.versions_text = lambda: f"qsync-torch 0.{int(rank == CULPRIT)}"
    try:
        apply_(model(), plan_of(), group="train")
    finally:
        ranks.versions_text = kept


def build_fails(rank: int, folder: Path) -> None:
    """An error that is not QSync's, between the exchanges: the ranks that are in order keep their model as it was."""
    kept, mine = applying.prebuild, model()
    if rank == CULPRIT:
        applying.prebuild = lambda *_: (_ for _ in ()).throw(RuntimeError("the disk is full\nand more"))
    try:
        apply_(mine, plan_of(), group=group_of(rank))
    finally:
        applying.prebuild = kept
        assert not any("forward" in module.__dict__ for module in mine.modules())
        assert "_qsync_applied" not in mine.__dict__


def two_refuse(rank: int, folder: Path) -> None:
    apply_(model() if rank == 0 else nn.Sequential(nn.ReLU()), plan_of(), group="train" if rank < 2 else "elsewhere")


def two_refuse_alike(rank: int, folder: Path) -> None:
    apply_(model(), plan_of(), group="train" if rank == 0 else "elsewhere")


def no_apply(rank: int, folder: Path) -> None:
    """The culprit has no plan, and goes on to its training's first collective."""
    if rank == CULPRIT:
        dist.all_reduce(torch.zeros(3))
    else:
        apply_(model(), plan_of(), group="train")


def comes_late(rank: int, folder: Path) -> None:
    if rank == CULPRIT:
        time.sleep(LONGER_S)
    apply_(model(), plan_of(), group="train")


def slow_to_build(rank: int, folder: Path) -> str:
    """A rank may take longer than the timeout where it is expected to."""
    with together("building", slow=True):
        if rank == CULPRIT:
            time.sleep(LONGER_S)
    return "built"


def stopped(rank: int, folder: Path) -> None:
    with together("building", slow=True):
        if rank == CULPRIT:
            sys.exit(3)


def other_call(rank: int, folder: Path) -> None:
    if rank == CULPRIT:
        ranks.check_ranks_agree(plan_of())
    else:
        apply_(model(), plan_of(), group="train")


def other_fact(rank: int, folder: Path) -> None:
    with together("apply_", {"autocast": "off"}) as facts:
        facts["matrix products"] = "tf32" if rank == CULPRIT else "float32"


def subgroups(rank: int, folder: Path) -> str:
    """Ranks 1 and 2 differ; rank 0, which is not of their group, goes on."""
    pair = dist.new_group([1, 2])
    ranks.check_ranks_agree(attrs.evolve(plan_of(), notes=("other",)) if rank == CULPRIT else plan_of(), pair)
    return "went on"


def other_scale(rank: int, folder: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    scaler = InStepGradScaler("cpu", init_scale=2.0 ** (10 if rank == CULPRIT else 12))
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.1))


def no_scale(rank: int, folder: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    scaler = InStepGradScaler("cpu", enabled=rank != CULPRIT)
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.1))


CASES: tuple[Callable[[int, Path], str | None], ...] = (
    agreed,
    wrong_group,
    no_plan_file,
    other_model,
    missing_backend,
    other_plan,
    other_parameters,
    local_parameters,
    other_formats,
    other_versions,
    build_fails,
    two_refuse,
    two_refuse_alike,
    no_apply,
    comes_late,
    slow_to_build,
    stopped,
    other_call,
    other_fact,
    subgroups,
    other_scale,
    no_scale,
)


def main(rank: int, folder: Path) -> None:
    found = {}
    for case in CASES:
        os.environ.pop("QSYNC_GROUP", None)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / case.__name__}",
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        try:
            found[case.__name__] = ["", case(rank, folder)]
        except (Exception, SystemExit) as error:
            found[case.__name__] = [type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])]
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["QSYNC_RANK_TIMEOUT_S"] = str(TIMEOUT_S)
    main(int(sys.argv[1]), Path(sys.argv[2]))
