"""Plugins: the hooks, the registry that loads and guards them, and what `qsync doctor` reports."""
