"""What a person is told on the way through all parts, of which nothing is measured here."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_torch.prepare import flow
from qsync_torch.prepare.measuring import Probe
from qsync_torch.prepare.participants import Participant
from qsync_torch.prepare.roles import alike_at_last, of_one_kind

CPU = DeviceType("cpu", DeviceKind.CPU)


@pytest.fixture
def told(monkeypatch, tmp_path):
    """What rank 0 says of a job of ranks with these groups' names, whose first steps and profiles are as given."""

    def run(names, first_ns=100, profiled_ns=100, **request):
        ranks = [Participant(rank, "host", f"kernel {rank}", (0,), CPU, 0, name, {}) for rank, name in enumerate(names)]
        made = {"job_software": {}, "describe_optimizer": "", "merge_disks": {}, "versions_text": "", "gather": ranks}
        made["unstorable"] = "weights stay as they are"
        for name, value in made.items():
            monkeypatch.setattr(flow, name, lambda *_, value=value, **__: value)
        monkeypatch.setattr(flow, "Bench", lambda *_: SimpleNamespace(check_base=lambda group: None))
        parts = {
            "_trace": SimpleNamespace(base=Precision.FLOAT32),
            "_described": None,
            "_agree_on_cluster": None,
            "_probes_of": {name: Probe(first_ns, (), 0, 0) for name in names},
            "_profiled": {name: profiled_ns * (1 + number) for number, name in enumerate(names)},
        }
        for name in ("_check_asked", "_communicate", "_measure", "_plan", "_compile"):
            parts[name] = None
        for name, value in parts.items():
            monkeypatch.setattr(flow._Flow, name, lambda *_, value=value: value)
        said = []
        board = SimpleNamespace(label="", stage=lambda _: lambda *__: None, note_of_job=lambda text: text and said.append(text))
        folder = SimpleNamespace(rank=0, members=None, parts={}, together=lambda *_, **__: nullcontext({}))
        asked = flow.Request("job.py:job", tmp_path, torch.device("cpu"), **request)
        job = SimpleNamespace(communication={}, compiles=None, model=None)
        found = flow._Flow(asked, folder, board)
        found.run(lambda: (job, None))
        return said, found

    return run


def test_ranks_that_are_one_group_are_told(told):
    said, found = told(["", ""])
    sentence = of_one_kind(found._groups)
    assert sentence.startswith("all 2 ranks are one group")
    assert said.count(sentence) == 1


def test_groups_that_are_alike_to_the_end_are_told(told):
    said, found = told(["a", "b"])
    sentence = alike_at_last(found._groups, found._probes_of(()), found._profiled(()), Precision.FLOAT32)
    assert sentence
    assert said[-2:] == ["weights stay as they are", sentence]
