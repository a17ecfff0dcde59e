"""Puts every mutant to the conformance suite in one process; prints ``name exit-code what-was-wrong`` as JSON."""

import contextlib
import io
import json

import mutants
import pytest


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


found = {}
for mutant in mutants.ALL:
    failures = Failures()
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "qsync_torch.conformance.plugin"]
    arguments += ["--pyargs", "qsync_torch.conformance", "--backend", f"mutants:{mutant.__name__}"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[failures])
    found[mutant.__name__] = [int(code), "\n".join(failures.texts), output.getvalue()[-2000:]]
print(json.dumps(found))
