"""Two records of versions and settings: what differs, and what is said of it."""

from __future__ import annotations

import pytest

from qsync_core.settings import SETTINGS, Difference, differences


def test_only_what_both_records_hold_is_compared_and_what_changes_numbers_comes_first() -> None:
    profile = {"torch": "2.13.0+cu128", "driver": "550.1", "cudnn_tf32": "True", "python": "3.11", "triton": "3.4"}
    job = {"torch": "2.13.0+cu126", "driver": "560.2", "cudnn_tf32": "False", "python": "3.12", "cudnn_benchmark": "True"}
    assert differences(profile, job) == (Difference("cudnn_tf32", "True", "False"), Difference("driver", "550.1", "560.2"))
    assert differences({}, job) == differences(profile, {}) == differences(job, job) == ()


def test_torch_counts_as_its_release() -> None:
    found = differences({"torch": "2.12.1+cu128"}, {"torch": "2.13.0+cu128"})
    assert [(one.profile, one.job, one.changes_numbers) for one in found] == [("2.12.1+cu128", "2.13.0+cu128", False)]


def test_what_changes_numbers() -> None:
    refused = {name for name, setting in SETTINGS.items() if setting.changes_numbers}
    assert {"device", "autocast", "float32_matmul", "cudnn_tf32", "cudnn_rnn_tf32"} < refused
    assert not {"cudnn_benchmark", "deterministic_algorithms", "memory_format", "torch", "driver", "cuda", "cudnn"} & refused


@pytest.mark.parametrize("name", SETTINGS)
def test_a_difference_names_the_setting_both_values_and_the_way_out(name: str) -> None:
    text = Difference(name, "one", "another").sentence("weak")
    assert text.startswith(f"{name} ({SETTINGS[name].what}) was one when group 'weak' was profiled and is another in this job; ")
    assert text.endswith(", or profile the job as it runs and plan again")
    assert "{" not in text
    assert "one" in text.partition(" in this job; ")[2]
