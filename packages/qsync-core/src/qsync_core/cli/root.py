"""The root command: core's subcommands, the plugins', and errors as one sentence."""

from __future__ import annotations

import errno
import select
import sys
import traceback
from functools import cached_property
from typing import Any, NoReturn

import click

from qsync_core.cli.backends import backends
from qsync_core.cli.doctor import doctor
from qsync_core.cli.launch import launch
from qsync_core.cli.output import say, spell_out_foreign_letters
from qsync_core.cli.show import show
from qsync_core.errors import PluginError, QSyncError, tell_torchrun
from qsync_core.plugins.guard import described, guard
from qsync_core.plugins.installing import pip_install
from qsync_core.plugins.registry import Registry
from qsync_core.printable import printable


class QSyncGroup(click.Group):
    """A group whose further commands come from plugins, loaded when first needed."""

    @cached_property
    def registry(self) -> Registry:
        """The installed plugins."""
        return Registry.load()

    @cached_property
    def _plugin_commands(self) -> dict[str, click.Command]:
        commands = self.registry.commands(taken=self.commands)
        for name, reason in self.registry.disabled.items():
            say(f"warning: plugin {name} is disabled: {reason}")
        return commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return sorted({*self.commands, *self._plugin_commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, None where there is none."""
        return self.commands.get(cmd_name) or self._plugin_commands.get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a missing one that an uninstalled package provides is named with that package."""
        package = _PROVIDER.get(args[0]) if args else None
        if package and self.get_command(ctx, args[0]) is None:
            disabled = self.registry.disabled.get(package)
            if disabled:
                problem = f"is disabled: {disabled}"
            elif package in self.registry.plugins:
                problem = "does not offer it in the installed version; upgrade it"
            else:
                problem = f"is not installed; run: {pip_install(package)}"
            raise click.UsageError(f"the command {args[0]!r} belongs to {package}, which {problem}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what a plugin's raises is a PluginError that names the plugin, after the traceback."""

        def failed(sentence: str, error: BaseException) -> NoReturn:
            name = ctx.invoked_subcommand
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                raise error  # click ends the program without a word
            if isinstance(error, OSError) and (remedy := _NOTHING_WRITTEN.get(error.errno or 0)):
                where = f" ({error.filename})" if error.filename else ""
                raise QSyncError(
                    f"qsync {name or ''} cannot write what it needs{where}: {error.strerror}; {remedy} and start it again"
                )
            if name is None or name in self.commands:
                raise error
            traceback.print_exception(error)
            owner = self.registry.command_owners[name]
            raise PluginError(f"plugin {owner}: its command {name} failed with {described(error)}") from error

        passing = (QSyncError, SystemExit, click.ClickException, click.exceptions.Exit, click.Abort)
        try:
            with guard("the command", failed, passing=passing, program=True):
                return super().invoke(ctx)
        except click.ClickException as error:  # quotes names of files
            error.message = printable(error.message)  # type: ignore[misc]  # final by its type, a plain attribute in truth
            raise

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run; a QSyncError becomes one line on standard error and exit status 1."""
        spell_out_foreign_letters()
        try:
            return super().main(*args, **extra)
        except QSyncError as error:
            if not extra.get("standalone_mode", True):
                raise
            sentence = " ".join(str(error).split())
            say(f"error: {sentence}")
            tell_torchrun(sentence)
            sys.exit(1)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone: ``qsync ... | head``."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)  # what is always told: errors
    except (OSError, ValueError):  # a stream of a test, or closed
        return False
    return bool(poll.poll(0))


_NOTHING_WRITTEN = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EROFS: "have it write to another folder",
}
"""What to do where the system lets a command, or a library under it, write no file: no fault of the command."""

_PROVIDER = {
    **dict.fromkeys(("indicate", "plan", "replay", "explain", "verify"), "qsync-planner"),
    **dict.fromkeys(("prepare", "trace", "profile", "communicate", "observe", "tune", "watch", "demo"), "qsync-torch"),
}


@click.group(cls=QSyncGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="qsync-core", prog_name="qsync")
def cli() -> None:
    """Train on unequal GPUs: lower the precision of only as many operators as it takes."""


cli.add_command(doctor)
cli.add_command(backends)
cli.add_command(launch)
cli.add_command(show)
