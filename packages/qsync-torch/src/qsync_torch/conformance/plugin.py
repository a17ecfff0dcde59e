"""The pytest plugin of the conformance suite: its options.  It stays silent in every run that is not of the suite."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SUITE = "qsync_torch.conformance"
_SHOWN = 8
"""How many reasons the last line of a run has, the most frequent first."""


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Add the options where the suite is asked for; elsewhere ``--backend`` may be another plugin's."""
    if _is_asked_for(args):
        add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Find the backend before anything runs: a wrong name is a wrong command line, not a failing test."""
    if not _is_asked_for(list(map(str, config.invocation_params.args))):
        return
    import pytest

    from qsync_core.errors import QSyncError
    from qsync_torch.conformance.subject import SUBJECT, Subject, find_backend, find_device

    try:
        backend = find_backend(config.getoption("--backend"))
    except QSyncError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[SUBJECT] = Subject(backend, find_device(config.getoption("--device")), config.getoption("--configs"))


def _is_asked_for(args: list[str]) -> bool:
    return any(argument.startswith(SUITE) and before != "-p" for before, argument in zip(["", *args], args, strict=False))


def add_options(parser: pytest.Parser) -> None:
    """``--backend``, ``--device`` and ``--configs``."""
    group = parser.getgroup("qsync", "conformance of a QSync kernel backend")
    group.addoption("--backend", metavar="NAME", help="the backend: its name if its plugin is installed, or package.module:Class")
    group.addoption("--device", choices=["cpu", "cuda"], help="where to run kernels (default: cuda where there is a device)")
    group.addoption(
        "--configs", type=int, default=3, metavar="N", help="how many configurations of each request to try (default: %(default)s)"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was not tested because the backend refuses it: among thousands of skipped tests of operators that it does not offer."""
    if not _is_asked_for(list(map(str, config.invocation_params.args))):
        return
    from qsync_torch.conformance.subject import REFUSES, SUBJECT

    subject = config.stash[SUBJECT]
    prefix = f"Skipped: {subject.backend.name} {REFUSES} "
    said = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    refused = Counter(text.removeprefix(prefix) for text in said if text.startswith(prefix)).most_common()
    shown = [f"{what} ({count} case{'s' if count > 1 else ''})" for what, count in refused[:_SHOWN]]
    if len(refused) > _SHOWN:
        shown.append(f"{len(refused) - _SHOWN} more (-rs shows them)")
    found = subject.offered
    terminalreporter.write_line(
        f"{subject.backend.name} offers {len(found)} operator{'s' if len(found) != 1 else ''} here; refused by its own reasons: "
        + ("; ".join(shown) or "nothing")
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Which backend is under test."""
    name = config.getoption("--backend", default=None)
    return [f"qsync backend under test: {name}"] if name else []
