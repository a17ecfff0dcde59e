"""Puts mutants, by their names, to the conformance suite in one process; prints ``name exit-code what-was-wrong`` as JSON."""

import contextlib
import io
import json
import sys

import pytest

from . import address_mutants, mutants, producer_mutants

SUITE = "qsync_torch.conformance"
FILES = {
    "quantize": ("test_quantize",),
    "linear": ("test_linear",),
    "conv2d": ("test_conv2d",),
    "batch_norm": ("test_producers", "test_producer_gradients"),
    "layer_norm": ("test_producers", "test_producer_gradients"),
    "activation": ("test_producers", "test_producer_gradients"),
}
"""Where an operator's mistakes are most likely found: these run first, all others only where they find nothing."""


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


def put_to(files, mutant):
    """Exit code, failures and output of those files of the suite."""
    failures = Failures()
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", f"{SUITE}.plugin", "--pyargs", *files]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*arguments, "--backend", f"{mutant.__module__}:{mutant.__name__}"], plugins=[failures])
    return [int(code), "\n".join(failures.texts), output.getvalue()[-2000:]]


found = {}
for mutant in (*mutants.ALL, *producer_mutants.ALL, *address_mutants.ALL):
    if mutant.__name__ not in sys.argv[1:]:
        continue
    likely = getattr(mutant, "files", FILES[mutant.op.partition(".")[0]])
    first = [f"{SUITE}.{name}" for name in ("test_interface", *likely)]
    verdict = put_to(first, mutant)
    found[mutant.__name__] = verdict if verdict[0] else put_to([SUITE], mutant)
print(json.dumps(found))
