"""``qsync prepare``: from a job to a finished run folder, on the machines that will train (docs/run-folder.md).

One of the three places of this package that need qsync-planner; the others are the demo and ``fits``.
"""
