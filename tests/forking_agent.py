"""torchrun, whose ranks are forks of the agent: it has imported what they need, and a restart takes no seconds of imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forked import become


def rank(arguments: Sequence[str]) -> None:
    """Become ``python arguments`` with the variables that the agent has set."""
    if status := become(arguments, dict(os.environ), os.getcwd()):
        os._exit(status)


def launch(config: LaunchConfig, entrypoint: object) -> Callable[..., object]:
    """Have the agent fork, where torchrun has it start an interpreter (``entrypoint``) with ``-u`` and what that is to run."""
    config.start_method = "fork"
    return lambda _, *arguments: elastic_launch(config, rank)(arguments)


run.elastic_launch = launch
run.main()
