"""``qsync demo``: two unequal workers on this machine train a real model under a plan that QSync found.

The parent runs :mod:`flow`: it traces, has the workers measure (:mod:`measuring`), plans (:mod:`planning`), has them train
(:mod:`training`), and shows the :mod:`outcome` and the :mod:`report`.  :mod:`workers` starts and is the worker processes,
:mod:`messages` is what they say, :mod:`weak_worker` makes one of them weak with what :mod:`cores` gives, :mod:`workloads` has the
models and data.  The only package of qsync-torch that may import the planner (extra ``demo``).
"""
