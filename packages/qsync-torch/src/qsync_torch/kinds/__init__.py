"""Kinds of operators whose precision a plan can pick: how PyTorch's functions and modules call each.

:mod:`~qsync_torch.kinds.table` makes them of the rows of :mod:`qsync_core.kinds`, which has what of them needs no PyTorch.  How to
add one: docs/operator-kinds.md.
"""
