"""Fixtures of the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qsync_torch.conformance.operands import Outputs
from qsync_torch.conformance.subject import SUBJECT, Subject


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Subject:
    """The backend under test on its device."""
    return pytestconfig.stash[SUBJECT]


@pytest.fixture
def outputs(subject: Subject) -> Iterator[Outputs]:
    """Where kernels write; checked afterwards for writes beside the outputs."""
    found = Outputs(subject.device)
    yield found
    found.check()
