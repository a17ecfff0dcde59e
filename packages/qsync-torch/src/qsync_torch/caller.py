"""Who puts a plan into force: the names and commands by which messages speak to a script's author."""

from __future__ import annotations

import os
import shlex
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
        arguments: what stands in the call of a run folder, whose path is ``{}``.
        own_loop: the script writes its training loop, and may change it.
    """

    call: str = "apply_"
    run: RunFolder | None = None
    options: str = "{}"
    arguments: str = "model, {}"
    own_loop: bool = True

    def line(self, folder: str | os.PathLike[str]) -> str:
        """What the script says to train under the plan of a run folder."""
        return f"{self.call}({self.arguments.replace('{}', repr(os.fspath(folder)))})"

    @property
    def keep_samples(self) -> str:
        """What to do where a step has fewer samples than the learning rate is for."""
        if not self.own_loop:
            return "change it in the script"
        keep_global = self.with_option("resize='keep-global'")
        return f"keep them with {keep_global} and the loop over applied.micro_batches(ddp) (docs/coming-and-going.md)"

    @property
    def prepare(self) -> str:
        """The command that makes the run folder for what the script trains now, quoted."""
        assert self.run is not None
        start = "torchrun …" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "python"
        script, *arguments = sys.argv
        if self.call in _WITHOUT_AMP or not script.endswith(".py"):
            script, arguments = "JOB", []
        own = ["--", *arguments] if arguments else []
        return f"'{start} -m qsync {shlex.join(['prepare', script, '-o', str(self.run.path), *own])}'"

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
        """The call by which a job says that it trains under autocast."""
        return f"{'Job' if self.call in _WITHOUT_AMP else self.call}(..., amp={amp!r})"


_WITHOUT_AMP = ("apply_", "qsync.compile")
"""Calls that a job stands beside, which says what the others are told."""
BY_HAND = Caller()
"""``apply_`` with a plan that was made step by step."""
