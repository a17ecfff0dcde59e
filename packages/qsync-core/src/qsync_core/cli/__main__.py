"""``python -m qsync_core.cli``: the ``qsync`` command where its script is not on the path."""

from qsync_core.cli import main

main()
