"""Puts mutants, all or by name, to the conformance suite, which is collected once; prints what was wrong."""

import contextlib
import io
import json
import sys
from collections import Counter

import attrs
import pytest

from qsync_torch.conformance.subject import SUBJECT

from . import address_mutants, mutants, producer_mutants, stride_mutants

SUITE = "qsync_torch.conformance"
ALL = {mutant.__name__: mutant for mutant in (*mutants.ALL, *producer_mutants.ALL, *address_mutants.ALL, *stride_mutants.ALL)}


class InTurn:
    """Runs the collected tests for one mutant after another, each up to the first that fails."""

    def __init__(self, names):
        self.names, self.found, self.failure = names, {}, ""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failure = f"{report.when}: {crash.message if crash else report.longreprtext}"[:2000]

    def pytest_runtestloop(self, session):
        aten = session.config.stash[SUBJECT]
        for name in self.names:
            session.config.stash[SUBJECT] = attrs.evolve(aten, backend=ALL[name]())
            self.found[name] = self.first_failure(ALL[name].op, session.items)
        return True

    def first_failure(self, op, items):
        """A case of each test in turn: first of the interface and of the operator that is wrong, then of the others."""
        cases = Counter()

        def turn(item):
            cases[item.originalname] += 1
            return not ("test_interface" in item.nodeid or op in item.nodeid), cases[item.originalname]

        self.failure = ""
        for item in sorted(items, key=turn):
            # Without a next test, all fixtures end with this one, and the next mutant gets a subject of its own.
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failure:
                break
        return self.failure


in_turn = InTurn(sys.argv[1:] or list(ALL))
arguments = ["-q", "-p", "no:cacheprovider", "-p", f"{SUITE}.plugin", "--pyargs", SUITE, "--backend", "aten"]
with contextlib.redirect_stdout(io.StringIO()) as output:
    pytest.main(arguments, plugins=[in_turn])
if not in_turn.found:
    sys.exit(output.getvalue())
print(json.dumps(in_turn.found))
