"""Loads hypothesis's profile; what tests of kernels' choice share."""

import sys

import pytest

import hypothesis_profiles  # noqa: F401


@pytest.fixture(autouse=True)
def _own_main(monkeypatch):
    """Puts pytest's ``__main__`` back, in whose place a script that is run stays."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def install(monkeypatch):
    """Pretends that packages with these backends are installed, beside aten."""
    from qsync_core.plugins.hooks import hookimpl
    from qsync_core.plugins.registry import Registry
    from qsync_torch.aten.backend import AtenBackend
    from qsync_torch.benchmarking import contenders
    from qsync_torch.kernels import binding, selection
    from qsync_torch.kernels import installed as installed_here
    from qsync_torch.tuning import chooser

    def forget_kernels():
        selection.find_backends.cache_clear()
        for bound in binding.BOUND.values():
            bound._kernels.clear()

    def install_(*backends):
        class Plugin:
            @hookimpl
            def qsync_register_backends(self):
                return [AtenBackend(), *backends]

        registry = Registry.load([])
        registry.register(Plugin(), "test-backends")
        for module in (selection, chooser, contenders, installed_here):
            monkeypatch.setattr(module, "installed", lambda: registry)
        forget_kernels()
        return registry

    yield install_
    forget_kernels()
