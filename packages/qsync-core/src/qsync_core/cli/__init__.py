"""The ``qsync`` command; its subcommands come from this package and from plugins."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``qsync`` command."""
    from qsync_core.cli.root import cli

    cli(prog_name="qsync")
