import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """Every test has a tuning file of its own."""
    path = tmp_path / "tuning.sqlite"
    monkeypatch.setenv("QSYNC_TUNING", str(path))
    return path
