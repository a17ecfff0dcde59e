"""The scripts of examples/gallery, prepared and trained by two ranks of one machine as their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import EXAMPLES, run_ranks

import forked
from nightly import nightly

pytestmark = pytest.mark.distributed(seconds=60)
PLACES = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "EPOCHS": "1", "STEPS": "10"} for rank in range(2)]


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """Of no effect where processes were started before: this file is one of the first."""
    forked.preload("sklearn.datasets", "transformers.models.vit.modeling_vit", "peft")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("contrastive.py", r"epoch 0: loss \d\.\d+"),
        ("lora.py", r"epoch 0: loss \d\.\d+"),
        *nightly(
            ("image.py", r"held-out accuracy \d+\.\d%"),
            ("causal_lm.py", r"step 10: loss \d\.\d+"),
            ("token_classification.py", r"step 10: loss \d\.\d+"),
        ),
    ],
)
def test_a_script_of_the_gallery_is_prepared_and_trained(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_text((EXAMPLES / "gallery" / name).read_text())
    for ended in run_ranks([["-m", "qsync", "prepare", name, "-o", "run"]] * 2, PLACES, cwd=tmp_path):
        assert ended.status == 0, ended.output
    assert (tmp_path / "run" / "report.html").is_file()
    first, second = run_ranks([[name]] * 2, PLACES, cwd=tmp_path)
    assert (first.status, second.status) == (0, 0), first.output + second.output
    assert re.search(said, first.output)
    warned = [line for line in first.output.splitlines() if "Warning" in line]
    assert all(" is slow in its " in line for line in warned), warned  # as a rank may be on a busy machine
