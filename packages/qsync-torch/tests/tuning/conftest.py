import pytest
import torch

from qsync_core.plugins.hooks import hookimpl
from qsync_core.plugins.registry import Registry
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.kernels import binding
from qsync_torch.kernels import installed as installed_here
from qsync_torch.kernels import selection as kernel_selection
from qsync_torch.tuning import chooser


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """Every test has a tuning file of its own."""
    path = tmp_path / "tuning.sqlite"
    monkeypatch.setenv("QSYNC_TUNING", str(path))
    return path


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
        for module in (kernel_selection, chooser, installed_here):
            monkeypatch.setattr(module, "installed", lambda: registry)
        kernel_selection.find_backends.cache_clear()
        forget_kernels()
        return registry

    def forget_kernels():
        for bound in binding.BOUND.values():
            bound._kernels.clear()

    yield install_
    forget_kernels()
    kernel_selection.find_backends.cache_clear()
