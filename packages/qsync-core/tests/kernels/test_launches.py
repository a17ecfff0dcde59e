"""A backend says that it tells of launches, or compiles where it launches; asked with its answers checked it still says so."""

from types import SimpleNamespace

import pytest

from qsync_core.kernels.launches import HERE, rehearsal_of, reports_launches
from qsync_core.plugins.backends import checked


@pytest.mark.parametrize("says", [{}, {"reports_launches": False}, {"reports_launches": True}])
def test_an_installed_backend_says_what_the_backend_says(says):
    backend = SimpleNamespace(name="some", api_version=1, **says)
    assert reports_launches(backend) == reports_launches(checked(backend)) == says.get("reports_launches", False)
    assert HERE.recorder is None


def test_an_installed_backend_rehearses_as_the_backend_does():
    begin = object
    assert rehearsal_of(checked(SimpleNamespace(name="some", api_version=1, rehearsal=begin))) is begin
    assert rehearsal_of(checked(SimpleNamespace(name="other", api_version=1))) is None
