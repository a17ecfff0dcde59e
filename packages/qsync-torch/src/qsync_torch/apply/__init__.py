"""Carrying out a plan in a model: which modules and calls are replaced, with what, and how it is taken back."""
