"""``qsync demo``: two unequal workers on this machine train a real model under a plan that QSync found.

One file a step of the flow: data and models (:mod:`digits`, :mod:`masked_sources`), the weak worker (:mod:`share`), what each
worker does (:mod:`worker`), what the parent does (:mod:`flow`), and what people get to see (:mod:`table`, :mod:`report`).
The only package of qsync-torch that may import the planner (extra ``demo``).
"""
