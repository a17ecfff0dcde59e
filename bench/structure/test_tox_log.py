"""Row S9 is read from what tox prints."""

import pytest

from structure.tox_log import read_tox_log

LOG = """core: OK ✔ in 30 seconds
  lint: OK (0.63=setup[0.58]+cmd[0.05] seconds)
  core: OK (40.00=setup[10.00]+cmd[0.50,29.50] seconds)
  example-backend: OK (5.25=setup[0.25]+cmd[5.00] seconds)
  \x1b[32mcongratulations :) (47.50 seconds)\x1b[0m
"""


def test_times_are_those_of_tox_with_and_without_installation():
    run = read_tox_log(LOG)
    assert run.whole_s == 47.5
    assert run.commands_s == pytest.approx({"lint": 0.05, "core": 30.0, "example-backend": 5.0})


def test_of_two_runs_in_a_log_the_last_counts():
    later = "  core: OK (12.50=setup[0.50]+cmd[12.00] seconds)\n  congratulations :) (13.00 seconds)\n"
    assert read_tox_log(LOG + later).commands_s == {"core": 12.0}


def test_a_run_that_failed_or_has_not_ended_is_refused():
    with pytest.raises(ValueError, match=r"core failed, .* mend it"):
        read_tox_log(LOG.replace("core: OK (", "core: FAIL code 1 (").replace("congratulations :)", "evaluation failed :("))
    with pytest.raises(ValueError, match="line with the seconds of all environments is missing"):
        read_tox_log("core: OK ✔ in 30 seconds\n")
