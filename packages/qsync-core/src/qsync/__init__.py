"""``python -m qsync``: the ``qsync`` command where its script is not on the path, as under torchrun.

In a training script the name is an alias: ``import qsync_torch as qsync``.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    raise AttributeError(f"module 'qsync' has no {name!r}: it is only the command; in a script write 'import qsync_torch as qsync'")
