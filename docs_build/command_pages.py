"""mkdocs hook: the command reference, read from the installed ``qsync`` command, so that it cannot fall behind."""

from __future__ import annotations

import html
import inspect
from typing import Any

import click
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PAGE = "cli.md"
EXPECTED = {
    "backends", "bench", "demo", "doctor", "explain", "indicate", "observe", "plan", "profile", "replay", "report", "show", "trace",
    "tune", "verify",
}  # fmt: skip
"""Commands that must be there: a page without them would only mean that a package was not installed."""
INTRODUCTION = """# Command line

Every command takes `--help` and, but for `watch`, `--json`. Results go to standard output; progress and warnings go to standard
error, progress only on a terminal. A command that cannot do what was asked prints one sentence that says what, where and what to do
next, writes no file, and exits with 1 (2 where the command line itself is wrong).

A shell completes commands, options and files once it is told so, by a line in its start-up file:

| shell | file | line |
|---|---|---|
| Bash (4.4 or later) | `~/.bashrc` | `eval "$(_QSYNC_COMPLETE=bash_source qsync)"` |
| Zsh | `~/.zshrc` | `eval "$(_QSYNC_COMPLETE=zsh_source qsync)"` |
| fish | `~/.config/fish/completions/qsync.fish` | `_QSYNC_COMPLETE=fish_source qsync \\| source` |

Commands come from the installed packages: `doctor`, `backends`, `launch` and `show` from qsync-core, `indicate`, `plan`, `replay`,
`explain`, `verify` and `report` from qsync-planner, the others from qsync-torch.
"""


def command_section(context: click.Context, name: str, command: click.Command) -> str:
    """One command as Markdown."""
    inner = click.Context(command, info_name=f"{context.info_name} {name}", parent=None)
    usage = " ".join([inner.command_path, *command.collect_usage_pieces(inner)])
    lines = [f"## qsync {name}", "", _paragraphs(command.help or ""), "", "```text", usage, "```", ""]
    options = [record for parameter in command.params if (record := parameter.get_help_record(inner)) and record[1]]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| <code>{_cell(names)}</code> | {_cell(meaning)} |" for names, meaning in options]
        lines.append("")
    return "\n".join(lines)


def _paragraphs(text: str) -> str:
    return inspect.cleandoc(text).replace("\b\n", "").replace("<", "&lt;")


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;").replace("[", "&#91;")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the page."""
    from qsync_core.cli.root import cli

    context = click.Context(cli, info_name="qsync")
    names = cli.list_commands(context)
    if missing := EXPECTED - set(names):
        raise PluginError(f"the commands {', '.join(sorted(missing))} are missing; install the packages that bring them")
    sections = [command_section(context, name, command) for name in names if (command := cli.get_command(context, name))]
    files.append(File.generated(config, PAGE, content="\n".join([INTRODUCTION, *sections])))
    return files
