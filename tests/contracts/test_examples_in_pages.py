"""Examples in the documentation name what is there; and what looks at them finds what is not."""

from __future__ import annotations

import sys

import pytest

from contracts.environment import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from journey import pages
from journey.examples import dead_examples, faults_of_command, faults_of_python


def test_no_example_is_dead():
    wrong, seen = dead_examples()
    assert wrong == []
    assert seen > 400


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("torchrun --nproc-per-node 2 -m qsync prepare train.py -o run --colour red", "qsync prepare has no --colour"),
        ("QSYNC_GROUP=a torchrun -m qsync prepares train.py", "there is no command 'prepares'"),
        ("tox run -e quickest", "tox has no environment 'quickest'"),
        ("python bench/ways.py --only W5", "there is no bench/ways.py"),
        ("python bench/way.py --solely W5", "bench/way.py has no --solely"),
        ("pip install -e packages/qsync-planer", "there is no package packages/qsync-planer"),
        ("pip install -e 'packages/qsync-torch[plans]'", "packages/qsync-torch has no extra 'plans'"),
        ("qsync launch 'run", "no shell reads"),
    ],
)
def test_a_command_that_names_what_is_not_there_is_found(line, fault):
    assert [found.startswith(fault) for found in faults_of_command(line, spelled_out=True)] == [True]


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node 2 -m qsync prepare train.py -o run --tolerance 0.05 -- --colour red",
        "torchrun -m qsync watch train.py --colour red",
        "python bench/way.py --only W5 --out results",
        "pip install -e 'packages/qsync-torch[plan]'",
        "python train.py --colour red",
    ],
)
def test_what_is_there_or_the_readers_own_is_left_alone(line):
    assert faults_of_command(line, spelled_out=True) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("for x in y:", "no Python"),
        ("from qsync_torch.jobs import Job", "qsync_torch.jobs has no Job"),
        ("from qsync_torch.job import Work", "qsync_torch.job has no Work"),
        ("import qsync_torch as q\nq.hybrids(model)", "qsync_torch has no hybrids"),
        ("qsync.watch(ddp, colour='red')", "watch has no argument 'colour'"),
        ("from qsync_torch.job import Batch\nBatch((x,), aim=y)", "Batch has no argument 'aim'"),
    ],
)
def test_python_that_names_what_is_not_there_is_found(text, fault):
    assert [found.startswith(fault) for found in faults_of_python(text)] == [True]


PAGE = "<html><nav><a href='lost.html'>all</a></nav><article>{}</article></html>"
USERS = "".join(f"<h2 id='{heading}'></h2>{{{user}}}" for user, heading in pages.USERS.items())


def test_a_page_that_no_link_in_the_text_leads_to_from_its_users_start_is_found(tmp_path, monkeypatch):
    links = {"Train": "<a href='train.html'></a>", "Operate": "<a href='more/run.html#a'></a>", "Extend": "", "Understand": ""}
    texts = {
        "index": USERS.format(**links),
        "train": "<a href='https://elsewhere.example/lost.html'></a>",
        "more/run": "<a href='../deep.html'></a>",
        "deep": "<a href='train.html'></a>",
        "lost": "<a href='train.html'></a>",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.html").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.html").write_text(PAGE.format(text))
    monkeypatch.setattr(pages, "_sections", lambda: {"Train": ["train.html", "deep.html"], "Operate": ["deep.html"]})
    lost, clicks = pages._without_way(tmp_path)
    assert lost == ["Train: deep.html", "lost.html"]
    assert clicks == {"train.html (Train)": 1, "deep.html (Operate)": 2, "more/run.html": 1}
