"""What one of three ranks runs, each with a run folder of its own; prints as JSON what each case gave or raised here.

``python ranks_of_run_folder.py RANK FOLDER PORT...``, with a port for each of :data:`BEFORE`; the others meet by a file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from run_folders import make_run_folder, model, plan_for

from qsync_core.artifacts.files import save
from qsync_core.run_folder import RunFolder
from qsync_torch import apply_, process_group_options
from qsync_torch.distributed import nccl

CULPRIT = 1
"""The rank whose folder is wrong, where one is."""


def applied(run: RunFolder, *groups: str) -> list[object]:
    """The group of this rank, what it runs in, and the groups of the plan: of an applied folder, by its path."""
    os.environ["QSYNC_GROUP"] = groups[dist.get_rank()]
    found = apply_(model(), str(run.path) + "/")
    plan = found.plan
    return [found.group, next(iter(found.variants.values())).label, [entry.group for entry in plan.groups]]


def all_groups(run: RunFolder, wrong: bool) -> list[object]:
    return applied(run, "train", "infer", "spare")


def two_groups(run: RunFolder, wrong: bool) -> list[object]:
    return applied(run, "train", "infer", "infer")


def one_group(run: RunFolder, wrong: bool) -> list[object]:
    return applied(run, "train", "train", "train")


def groups_without_a_plan(run: RunFolder, wrong: bool) -> list[object]:
    return applied(run, "infer", "infer", "spare")


def no_folder(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        shutil.rmtree(run.path)
    return applied(run, "train", "infer", "spare")


def other_cluster(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        make_run_folder(run.path, ["train", "spare"])
    return applied(run, "train", "infer", "spare")


def half_a_cluster_file(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        run.cluster.write_text(run.cluster.read_text()[:35])
    return applied(run, "train", "infer", "spare")


def half_a_plan(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        path = run.plan(["train", "infer"])
        path.write_bytes(path.read_bytes()[:-20])
    return applied(run, "train", "infer", "infer")


def renamed_plan(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        shutil.copy(run.plan(["train"]), run.plan(["train", "infer"]))
    return applied(run, "train", "infer", "infer")


def other_plan(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        save(plan_for(["train", "infer"], "another"), run.plan(["train", "infer"]))
    return applied(run, "train", "infer", "infer")


def before_ranks_meet(run: RunFolder, wrong: bool) -> list[object]:
    """The number of CTAs of the plan that the options were taken from: a plan has as many as groups."""
    found = []
    for groups in (("train", "infer", "infer"), ("train", "infer", "spare")):
        os.environ["QSYNC_GROUP"] = groups[int(os.environ["RANK"])]
        found.append(process_group_options(run))
    return found


def no_folder_before_ranks_meet(run: RunFolder, wrong: bool) -> list[object]:
    if wrong:
        shutil.rmtree(run.path)
    return before_ranks_meet(run, wrong)


BEFORE = (before_ranks_meet, no_folder_before_ranks_meet)
CASES: tuple[Callable[[RunFolder, bool], list[object]], ...] = (
    all_groups,
    two_groups,
    one_group,
    groups_without_a_plan,
    no_folder,
    other_cluster,
    half_a_cluster_file,
    half_a_plan,
    renamed_plan,
    other_plan,
    *BEFORE,
)


def main(rank: int, folder: Path, ports: list[str]) -> None:
    torch.cuda.is_available = dist.is_nccl_available = lambda: True  # as far as the process group's options ask
    nccl.nccl_options = lambda max_ctas: max_ctas
    found = {}
    for case in CASES:
        run = make_run_folder(folder / f"{case.__name__}{rank}" / "run")
        if case not in BEFORE:
            torch.cuda.is_available = lambda: False
            store = f"file://{folder}/{case.__name__}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=120))
        else:
            port = ports[BEFORE.index(case)]
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            torch.cuda.is_available = lambda: True
        try:
            found[case.__name__] = ["", case(run, rank == CULPRIT)]
        except Exception as error:
            found[case.__name__] = [type(error).__name__, re.sub(r"[^ ']*/run\b", "RUN", str(error))]
        if case in BEFORE:  # the store of the options is the one that the process group finds
            dist.init_process_group("gloo", timeout=timedelta(seconds=120))
            dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["QSYNC_RANK_TIMEOUT_S"] = "20"
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
