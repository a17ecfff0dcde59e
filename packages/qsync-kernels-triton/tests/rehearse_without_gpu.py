"""Launches the kernels of ``launch_without_gpu.py`` after a rehearsal, or without one; run without the interpreter.

Prints, as JSON, what was compiled and what was launched in the rehearsal and after it.

Usage: python rehearse_without_gpu.py [rehearse | fail], of which ``fail`` has nothing compile in the rehearsal.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings

from launch_without_gpu import CALLS, Driver, cases, no_further_than_read
from triton import knobs
from triton.runtime import driver

from qsync_kernels_triton.backend import TritonBackend

COMPILED = []


def is_compiled(*, fn, key, **_):
    COMPILED.append(f"{fn.name} {key}")


def compiles(*called):
    if called and sys.argv[1:] == ["fail"] and threading.current_thread() is not threading.main_thread():
        raise RuntimeError("it does not compile")
    return no_further_than_read(*called)


def seen():
    found = {"compiled": list(COMPILED), "launched": list(CALLS)}
    COMPILED.clear()
    CALLS.clear()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    driver.set_active(Driver())
    knobs.runtime.add_stages_inspection_hook = compiles
    knobs.runtime.jit_post_compile_hook = is_compiled
    calls, rounds = list(cases()), []
    if sys.argv[1:]:
        with TritonBackend().rehearsal():
            for kernel, operands in calls:
                kernel(*operands)
        rounds.append(seen())
    for kernel, operands in calls:
        kernel(*operands)
    print(json.dumps([*rounds, seen()]))
