"""A training script that is watched as it stands: its wrappers are found where the first of them is called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from qsync_torch.distributed.process_group import keep_until_exit


def run_script(path: Path, arguments: Sequence[str], begin: Callable[..., object]) -> None:
    """Run a script as ``python path arguments`` does, and call ``begin`` once with what its loop calls.

    That is before the first forward of a model in DistributedDataParallel; further wrappers that are there by then are behind it.

    The script stays ``__main__`` until the process ends, as in Python: a wrapper that is dropped earlier, after its process group
    is destroyed, joins the group's threads while it holds the lock that they wait for.

    Raises:
        Exception: what the script raises.
    """

    def look(module: nn.Module, args: Any) -> None:
        inner = getattr(module, "_orig_mod", None)  # of what torch.compile makes
        if not isinstance(module, DistributedDataParallel) and not isinstance(inner, DistributedDataParallel):
            return
        handle.remove()
        others = [
            one for one in gc.get_objects() if type(one) is DistributedDataParallel and one is not module and one is not inner
        ]
        keep_until_exit()  # a wrapper that a function of the script drops would wait for the group's threads
        begin(module, *others)

    handle = register_module_forward_pre_hook(look)
    folder, command_line = str(path.resolve().parent), sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, folder)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(main))
    finally:
        handle.remove()
        sys.argv = command_line
