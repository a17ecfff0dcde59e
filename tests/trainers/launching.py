"""Two processes of one job, and the scripts of docs/trainers.md."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from forked import run_forked
from processes import free_port

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "trainers.md"
GROUPS = ("train", "infer")
TIMEOUT_S = 240


def scripts_of_the_page() -> dict[str, str]:
    """By file name, as its first line says: the blocks of the page that are whole scripts."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(blocks)


def run_ranks(script: Path | str, folder: Path, arguments: Sequence[str] = (), groups: Sequence[str] = GROUPS) -> list[str]:
    """Run a script as torchrun would on one machine, in ``folder``; by default the first rank trains, the second is lowered.

    Where ``script`` is ``-m``, the module is the first of the arguments.

    Returns:
        What each rank printed.  A rank that fails fails the test.
    """
    ended = end_ranks(script, folder, arguments, groups)
    assert [status for status, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    return [output for _, output in ended]


def end_ranks(
    script: Path | str, folder: Path, arguments: Sequence[str] = (), groups: Sequence[str] = GROUPS
) -> list[tuple[int, str]]:
    """:func:`run_ranks`, with the status of each rank."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("QSYNC_", "ACCELERATE_"))}
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "trainers",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",  # with the cpu:0 that it finds itself, transformers cannot read its checkpoint
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "QSYNC_GROUP": group} for rank, group in enumerate(groups)]
    ended = run_forked(
        [[str(script), *arguments]] * len(own), [inherited | job | rank for rank in own], cwd=folder, timeout_s=TIMEOUT_S
    )
    return [(rank.status, rank.output) for rank in ended]
