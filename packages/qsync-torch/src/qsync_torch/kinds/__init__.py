"""Kinds of operators whose precision a plan can pick: how PyTorch's functions and modules call each, a file a kind.

:mod:`~qsync_torch.kinds.table` lists them; :mod:`qsync_core.kinds` has what of them needs no PyTorch.  How to add one:
docs/operator-kinds.md.
"""
