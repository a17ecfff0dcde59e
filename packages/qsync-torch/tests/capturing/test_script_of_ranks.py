"""Scripts that make a process group of their own, run to their line by two ranks over gloo."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from forked import TORCHRUN, Forked
from processes import free_port
from qsync_core.errors import JobError
from qsync_torch.capturing.script import job_of_script

from .scripts import PLAIN, write

pytestmark = pytest.mark.distributed
DRIVER = Path(__file__).with_name("script_of_two_ranks.py")
GROUP = """        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        model = torch.nn.parallel.DistributedDataParallel(Net())
"""


def script(folder: Path, *, destroys: bool) -> Path:
    """DistributedDataParallel around the model, and perhaps a tidy end."""
    text = PLAIN.replace("        model = Net()\n", GROUP)
    return write(
        folder,
        text.replace("        finally:\n", "        finally:\n            dist.destroy_process_group()\n") if destroys else text,
    )


@pytest.mark.parametrize(
    ("torchrun", "destroys"), [(True, True), (False, False)], ids=["torchrun, destroyed", "environment alone, left"]
)
def test_another_process_group_is_made_in_place_of_the_scripts(tmp_path, torchrun, destroys):
    command = [str(DRIVER), str(script(tmp_path, destroys=destroys))]
    if torchrun:
        started = [Forked([TORCHRUN, "--nproc-per-node", "2", "--standalone", *command], cwd=tmp_path)]
    else:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = [Forked(command, cwd=tmp_path, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(2)]
    ended = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), ended
    said = re.findall(r"rank (\d): (\w+ \w+) (\w+) \[([\d., ]+)\]", "".join(out for out, _ in ended))
    assert sorted(said) == [(str(rank), "Net gloo", "False", "3.0, 3.0") for rank in range(2)]


def test_a_script_cannot_make_its_process_group_where_there_is_one(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(JobError, match=r"there is a process group already, so .*train\.py cannot make its own"):
            job_of_script(write(tmp_path))
    finally:
        dist.destroy_process_group()
