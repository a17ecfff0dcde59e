"""Compiling a model under a plan: finding chains in the graphs of ``torch.compile``, and putting producers into them."""
