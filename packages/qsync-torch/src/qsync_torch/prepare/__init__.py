"""``qsync prepare``: from a job to a finished run folder, on the machines that will train (docs/run-folder.md).

One of the two places of this package that need qsync-planner; the other is the demo.
"""
