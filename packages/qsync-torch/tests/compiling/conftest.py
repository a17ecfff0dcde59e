import logging

import pytest
import torch

from qsync_torch.compiling import compile as compiling


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fused(caplog):
    """What was fused so far, and why what was found was not."""
    caplog.set_level(logging.INFO, "qsync_torch.compiling.rewriting")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "qsync_torch.compiling.rewriting"]


@pytest.fixture
def counted(monkeypatch):
    """A function that has a rewriting of compiled graphs counted: what it did to each, where anything."""

    def watch(name):
        rewrite, counts = getattr(compiling, name), []

        def counting(graph):
            if found := rewrite(graph):
                counts.append(found)
            graph.lint()
            return found

        monkeypatch.setattr(compiling, name, counting)
        return counts

    return watch
