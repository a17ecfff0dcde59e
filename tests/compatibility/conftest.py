"""One pair of processes for all tests that run on two ranks."""

from __future__ import annotations

import json

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def ranks(request, tmp_path_factory):
    """By test, what its body gave on each rank; where pytest-xdist runs several processes, one of them finds out for all."""
    from compatibility.two_ranks import name_of, run_bodies

    bodies = [item.function.body for item in request.session.items if hasattr(getattr(item, "function", None), "body")]
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if hasattr(request.config, "workerinput") else base
    found = folder / "two_ranks.json"
    with FileLock(folder / "two_ranks.lock"):
        if not found.exists():
            found.write_text(json.dumps(run_bodies([name_of(body) for body in bodies], tmp_path_factory.mktemp("ranks"))))
    return json.loads(found.read_text())
