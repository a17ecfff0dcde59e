"""Who puts a plan into force: the names and commands by which messages speak to a script's author."""

from __future__ import annotations

import os
import sys

import attrs

from qsync_core.run_folder import RunFolder


@attrs.frozen
class Caller:
    """What a script calls, and where its plan comes from.

    Attributes:
        call: the function, as the script writes it.
        run: the folder of ``qsync prepare`` that holds the plan; None where the plan was made step by step.
        options: how the call takes an argument of ``apply_``, which stands for ``{}``.
    """

    call: str = "apply_"
    run: RunFolder | None = None
    options: str = "{}"

    @property
    def prepare(self) -> str:
        """The command that makes the run folder, quoted."""
        assert self.run is not None
        start = "torchrun …" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "python"
        script = sys.argv[0] if self.call not in _WITHOUT_AMP and sys.argv[0].endswith(".py") else "JOB"
        return f"'{start} -m qsync prepare {script} -o {self.run.path}'"

    @property
    def trace_again(self) -> str:
        """What to do where a plan is for another model, or for the model called otherwise."""
        again = "trace this model, called as it is in training, and plan again"
        return again if self.run is None else f"run {self.prepare} again"

    @property
    def profile_again(self) -> str:
        """What to do where a plan is for other devices, settings or batches."""
        return "profile the job as it runs and plan again" if self.run is None else f"run {self.prepare} again"

    @property
    def plan_again(self) -> str:
        """What to do where the profiles still hold."""
        return "plan again" if self.run is None else f"run {self.prepare} again"

    def with_option(self, text: str) -> str:
        """The call with one more argument."""
        return f"{self.call}(..., {self.options.replace('{}', text)})"

    def with_amp(self, amp: str) -> str:
        """Where a job says that it trains under autocast."""
        return f"{'Job' if self.call in _WITHOUT_AMP else self.call}(..., amp={amp!r})"


_WITHOUT_AMP = ("apply_", "qsync.compile")
"""Calls that a job stands beside, which says what the others are told."""
BY_HAND = Caller()
"""``apply_`` with a plan that was made step by step."""
