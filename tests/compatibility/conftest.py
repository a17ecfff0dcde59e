"""One pair of processes for all tests that run on two ranks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def ranks(request, tmp_path_factory):
    """By test, what its body gave on each rank."""
    from compatibility.two_ranks import name_of, run_bodies

    bodies = [item.function.body for item in request.session.items if hasattr(getattr(item, "function", None), "body")]
    return run_bodies([name_of(body) for body in bodies], tmp_path_factory.mktemp("ranks"))
