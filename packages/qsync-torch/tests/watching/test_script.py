"""``qsync watch``: a script runs as it does by itself, and its wrappers are found when the first of them is called."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel

from qsync_core.cli import root
from qsync_torch.distributed import process_group
from qsync_torch.watching.script import run_script
from qsync_torch.watching.watch import RankWatch

SCRIPT = """
import sys
import beside
import torch
from torch.nn.parallel import DistributedDataParallel

assert __name__ == "__main__"
torch.nn.Linear(2, 2)(torch.ones(1, 2))  # in no wrapper
generator, critic = (DistributedDataParallel(torch.nn.Linear(2, 2)) for _ in range(2))
for _ in range(2):
    critic(generator(torch.ones(1, 2))).sum().backward()
print("trained with", sys.argv[1:], beside.NAME)
"""


@pytest.fixture(autouse=True)
def main(monkeypatch):
    """``__main__`` is put back, which a script replaces."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script beside a module that it imports, in a process group of one."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "beside.py").write_text("NAME = 'a neighbour'")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield path
    dist.destroy_process_group()
    sys.modules.pop("beside", None)


def test_the_wrappers_of_a_script_are_found_once_and_it_runs_as_by_itself(script, capsys):
    begun, before = [], list(sys.argv)
    run_script(script, ["--lr", "0.1"], lambda *models: begun.append([type(model) for model in models]))
    assert begun == [[DistributedDataParallel] * 2]
    assert capsys.readouterr().out == "trained with ['--lr', '0.1'] a neighbour\n"
    assert sys.argv == before
    assert not module._global_forward_pre_hooks


def test_the_process_group_outlives_the_wrappers_of_a_script(script, monkeypatch):
    monkeypatch.setattr(process_group, "_KEPT", kept := [])
    run_script(script, [], lambda *models: None)
    assert kept == [dist.group.WORLD]


@pytest.mark.parametrize("end", ["", "raise SystemExit"])
def test_what_a_script_holds_outlives_its_end(tmp_path, end):
    path = tmp_path / "train.py"
    path.write_text(f"class Model:\n    pass\n\nmodel = Model()\n{end}")
    with contextlib.suppress(SystemExit):
        run_script(path, [], lambda *models: None)
    gc.collect()
    held = [one for one in gc.get_objects() if type(one).__name__ == "Model" and type(one).__module__ == "__main__"]
    assert len(held) == 1
    assert sys.modules["__main__"].model is held[0]


def test_who_is_slow_is_said_in_a_line(script, capsys, recwarn):
    rank_watch = RankWatch(DistributedDataParallel(torch.nn.Linear(1, 1)))
    rank_watch._say("rank 1 is slow")
    rank_watch.close()
    assert capsys.readouterr().err == "qsync: rank 1 is slow\n"
    assert not [one for one in recwarn if "slow" in str(one.message)]


def watch(*arguments: str | Path) -> tuple[int, str, str]:
    ended = CliRunner().invoke(root.cli, ["watch", *map(str, arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


def test_the_command_passes_the_scripts_own_options_on(script):
    assert watch(script, "--lr", "0.1", "-h") == (0, "trained with ['--lr', '0.1', '-h'] a neighbour\n", "")


def test_a_script_without_a_wrapper_is_told_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('trained')")
    status, out, err = watch(path)
    assert (status, out) == (0, "trained\n")
    assert "train.py has called no model in DistributedDataParallel, so there was nothing to compare" in err


def test_an_error_of_the_script_is_shown_from_the_script_on(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("def step():\n    raise ValueError('the loss is gone')\n\nstep()\n")
    status, _, err = watch(path)
    assert status == 1
    assert err.startswith("Traceback")
    assert "ValueError: the loss is gone" in err
    assert "runpy" not in err
    assert "plugin" not in err


def test_what_is_no_file_is_refused(tmp_path):
    status, _, err = watch(tmp_path / "train.py")
    assert status == 2
    assert "train.py' does not exist" in err
