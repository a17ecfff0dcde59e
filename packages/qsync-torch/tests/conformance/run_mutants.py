"""Puts mutants, all or by name, to the conformance suite in one process; prints ``name exit-code what-was-wrong`` as JSON."""

import contextlib
import io
import json
import sys

import pytest

from . import address_mutants, mutants, producer_mutants, stride_mutants

SUITE = "qsync_torch.conformance"


class Failures:
    """Keeps what went wrong."""

    def __init__(self):
        self.texts = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.texts.append(f"{report.when}: {crash.message if crash else report.longreprtext}"[:2000])

    def pytest_collectreport(self, report):
        if report.failed:
            self.texts.append(f"collection: {report.longreprtext}")


def put_to(mutant, *selected):
    """Exit code, failures and output of the suite, or of what is selected of it."""
    failures = Failures()
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", f"{SUITE}.plugin", "--pyargs", SUITE, *selected]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*arguments, "--backend", f"{mutant.__module__}:{mutant.__name__}"], plugins=[failures])
    return [int(code), "\n".join(failures.texts), output.getvalue()[-2000:]]


found = {}
for mutant in (*mutants.ALL, *producer_mutants.ALL, *address_mutants.ALL, *stride_mutants.ALL):
    if sys.argv[1:] and mutant.__name__ not in sys.argv[1:]:
        continue
    verdict = put_to(mutant, "-k", f"test_interface or {mutant.op}")  # where its mistake is most likely found
    found[mutant.__name__] = verdict if verdict[0] else put_to(mutant)
print(json.dumps(found))
