"""``qsync demo``: two unequal workers on this machine train a real model under a plan that QSync found.

It is ``qsync prepare`` and a script with QSync's one line, :mod:`train`, run as on two machines (:mod:`flow`): one worker is weak
(:mod:`weak_worker`), the :mod:`workloads` are as large as time permits (:mod:`probe`), and the same script then trains under
QSync's plan and under those of the other methods (:mod:`planning`), which :mod:`measuring`, :mod:`outcome` and :mod:`report`
compare.  With ``prepare`` the only package of qsync-torch that may import the planner (extra ``demo``).
"""
