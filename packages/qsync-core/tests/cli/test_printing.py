"""What commands print where letters, room or the stream itself are missing."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from artifact_examples import examples
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsync_core.artifacts import files as artifact
from qsync_core.cli.output import emit, open_console, print_table
from qsync_core.cli.root import QSyncGroup
from qsync_core.errors import PlanError
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.printable import is_printable

MODEL = "Ω → µs × 3 – «naïve»"


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.qsync"
    artifact.save(attrs.evolve(examples(layers=1)[PrecisionPlan], model=MODEL), path)
    return path


def show(path: Path, *options: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "qsync_core.cli", "show", str(path), *options]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    # Python itself would take UTF-8 for C's ASCII.
    environment = {**inherited, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **environment}
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({"PYTHONIOENCODING": "ascii"}, "ascii", "Omega -> us x 3 - \\xabna\\xefve\\xbb"),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", "Omega -> µs × 3 - «naïve»"),
        ({"LC_ALL": "C"}, "ascii", "Omega -> us x 3 - \\xabna\\xefve\\xbb"),
        ({"PYTHONIOENCODING": "utf-8"}, "utf-8", MODEL),
    ],
    ids=str,
)
def test_other_encodings_than_utf8(plan_file: Path, environment: dict[str, str], encoding: str, expected: str) -> None:
    told = show(plan_file, **environment)
    assert (told.returncode, told.stderr) == (0, b"")
    assert expected in told.stdout.decode(encoding)
    told = show(plan_file, "--json", **environment)
    assert (told.returncode, told.stderr) == (0, b"")
    assert json.loads(told.stdout.decode(encoding))["content"]["model"] == MODEL


def test_names_that_are_no_text(tmp_path: Path) -> None:
    told = show(tmp_path / os.fsdecode(b"no\xfftext"), PYTHONIOENCODING="utf-8")
    assert (told.returncode, told.stderr.count(b"\n")) == (1, 1)
    assert b"is not there" in told.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_under_standard_output(plan_file: Path, options: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        told = show(plan_file, *options, stdout=full)
    assert (told.returncode, told.stderr) == (1, b"error: cannot print the result: No space left on device\n")


def test_a_reader_that_leaves_ends_the_command_without_a_word(plan_file: Path) -> None:
    mine, other = os.pipe()
    os.close(mine)
    try:
        told = show(plan_file, "--json", stdout=other)
    finally:
        os.close(other)
    assert (told.returncode, told.stderr) == (1, b"")


def test_tables_are_not_cut_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    log = io.StringIO()
    print_table(open_console(file=log), ("rank", "communication", "forward"), [("r" * 20, "c" * 30, "f" * 30)])
    assert log.getvalue().splitlines()[1].split() == ["r" * 20, "c" * 30, "f" * 30]


PLUGINS_COMMAND = """
import click
from qsync_core.cli.root import QSyncGroup

cli = QSyncGroup("cli")
cli._plugin_commands = {"far": click.Command("far", help="A plugin's.")}
cli(["far", "--help"])
"""


def test_a_reader_that_leaves_a_plugins_command_is_no_fault_of_the_plugin() -> None:
    mine, other = os.pipe()
    os.close(mine)
    try:
        told = subprocess.run(
            [sys.executable, "-c", PLUGINS_COMMAND], stdout=other, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(other)
    assert (told.returncode, told.stderr) == (1, b"")


def test_no_standard_output_at_all(plan_file: Path) -> None:
    command = f'"{sys.executable}" -m qsync_core.cli show "{plan_file}" >&-'
    told = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=False)
    assert (told.returncode, told.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "No space left on device; make room"),
        (errno.EROFS, "Read-only file system; have it write to another folder"),
    ],
)
def test_a_disk_that_takes_nothing_is_no_fault_of_the_command(number: int, said: str) -> None:
    cli = QSyncGroup("cli")

    @cli.command()
    def fill() -> None:
        raise OSError(number, os.strerror(number), "/somewhere/scratch")

    told = CliRunner().invoke(cli, ["fill"])
    expected = f"error: qsync fill cannot write what it needs (/somewhere/scratch): {said} and start it again\n"
    assert (told.exit_code, told.stderr) == (1, expected)
    assert click.get_current_context(silent=True) is None


OBEYED = "\x1b]0;mine\x07\x1b[2J\x9b1A\r\x08\u202egnp\u2066\x7f[/bold][link=file:///etc]x[/link]"
SPELLED = r"\x1b]0;mine\x07\x1b[2J\x9b1A\r\x08\u202egnp\u2066\x7f[/bold][link=file:///etc]x[/link]"


def printed(render: Any, json_flag: bool = False) -> bytes:
    """What a command prints on a terminal of colours."""

    @click.command()
    def command() -> None:
        emit(json_flag, {"model": OBEYED}, render)

    return CliRunner().invoke(command, env={"FORCE_COLOR": "1", "COLUMNS": "300"}).stdout_bytes


def test_what_a_result_quotes_is_shown_and_not_obeyed():
    def render(console: Console) -> None:
        console.print(OBEYED)
        table = Table(OBEYED, title=OBEYED)
        table.add_row(OBEYED, style="bold")
        table.add_row(Text(OBEYED, style="red"))
        console.print(table)

    told = printed(render).decode()
    assert told.count(r"\x1b]0;mine") == 5
    for styled in ("\x1b[1m", "\x1b[31m", "\x1b[3m", "\x1b[0m", "\x1b[1;31m"):  # rich's own
        told = told.replace(styled, "")
    assert is_printable(told)
    assert json.loads(printed(render, json_flag=True)) == {"model": OBEYED}
    assert is_printable(printed(render, json_flag=True).decode())


def test_errors_notes_and_usage_are_shown_and_not_obeyed(tmp_path: Path):
    assert str(PlanError(OBEYED)) == SPELLED
    with pytest.raises(PlanError) as caught:
        raise PlanError(f"the plan of {OBEYED}")
    assert is_printable("".join(traceback.format_exception(caught.value)))

    @click.command()
    @click.argument("path", type=click.Path(exists=True))
    def command(path: str) -> None: ...

    group = QSyncGroup(commands={"read": command})
    refused = CliRunner().invoke(group, ["read", str(tmp_path / OBEYED.replace("/", "|"))])
    assert refused.exit_code == 2
    assert r"\x1b]0;mine\x07" in refused.stderr
    assert is_printable(refused.stderr)
    told = show(tmp_path / "\x1b[2J.qsync")
    assert (told.returncode, told.stderr) == (
        1,
        f"error: cannot read {tmp_path}/\\x1b[2J.qsync: No such file or directory\n".encode(),
    )
