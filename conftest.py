"""The order in which files of tests are handed out to processes; a garbage collector that looks seldom, at what tests make."""

from __future__ import annotations

import gc

import pytest

SELDOM = (50_000, 10, 10)
"""Instead of 700 objects that are new: collections took a ninth of the time of tests that compile, which make many."""


def pytest_configure() -> None:
    """Have the garbage collector look seldom, from the collection of tests on."""
    gc.set_threshold(*SELDOM)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: all processes wait for a long file that one of them begins last."""
    slow = {item.path for item in items if any(item.get_closest_marker(name) for name in ("slow", "distributed"))}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Take modules and collected tests, which stay to the end, out of collections: profiling asks for many, half a second each."""
    gc.collect()
    gc.freeze()
