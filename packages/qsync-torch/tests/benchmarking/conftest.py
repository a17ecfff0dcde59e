import pytest
import torch

from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.registry import Registry
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.benchmarking import contenders
from qsync_torch.kernels import selection


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def install(monkeypatch):
    """Pretends that packages with these backends are installed, beside aten."""

    def install_(*backends):
        class Plugin:
            @hookimpl
            def qsync_register_backends(self):
                return [AtenBackend(), *backends]

        registry = Registry.load([])
        registry.register(Plugin(), "test-backends")
        for module in (selection, contenders):
            monkeypatch.setattr(module, "installed", lambda: registry)
        selection.find_backends.cache_clear()

    yield install_
    selection.find_backends.cache_clear()
