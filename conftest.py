"""The order in which files of tests are handed out to processes; a garbage collector that looks seldom, at what tests make."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

MAIN = sys.modules["__main__"]
SELDOM = (50_000, 10, 10)
"""Instead of 700 objects that are new: collections took a ninth of the time of tests that compile, which make many."""


def pytest_configure() -> None:
    """Have the garbage collector look seldom, from the collection of tests on."""
    gc.set_threshold(*SELDOM)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, the longest before all: the other processes wait for a long file that one begins last."""
    seconds: dict[Path, float] = {}
    for item in items:
        for mark in filter(None, map(item.get_closest_marker, ("slow", "distributed"))):
            seconds[item.path] = max(seconds.get(item.path, 0.0), mark.kwargs.get("seconds", 5.0))
    items.sort(key=lambda item: -seconds.get(item.path, 0.0))


def pytest_collection_finish() -> None:
    """Take modules and collected tests, which stay to the end, out of collections: profiling asks for many, half a second each."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Put ``__main__`` back, which a script that came to its line stays: processes that a later test starts would run it again."""
    sys.modules["__main__"] = MAIN
