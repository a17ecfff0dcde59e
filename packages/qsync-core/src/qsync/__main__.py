"""Runs the command."""

from qsync_core.cli import main

main()
