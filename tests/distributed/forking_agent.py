"""torchrun, whose ranks are forks of the agent: it has imported what they need, and a restart takes no seconds of imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

from forked import become


def rank(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Become ``python arguments`` with the variables that the agent has set."""
    if status := become(arguments, {**os.environ, **env}, os.getcwd()):
        os._exit(status)


config, _, command = run.config_from_args(run.parse_args(sys.argv[1:]))
config.start_method = "fork"
elastic_launch(config, rank)(command[1:], dict(os.environ))
