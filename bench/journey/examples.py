"""Dead examples in the documentation: what a command line or a block of Python names and is not there.

Commands are compared with the installed ones, files and environments with the repository, blocks of Python with what can be
imported; nothing is run.  The tests run what is to be run (tests/distributed/test_gallery.py, tests/trainers and others).
"""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=\S*")
_PACKAGES = ("qsync_core", "qsync_planner", "qsync_torch", "qsync_kernels_triton", "qsync_kernels_cutlass")
_FOLDERS = ("bench/", "docs_build/", "examples/", "release/", "tests/")
"""Where the repository's scripts are; a script of another place is the reader's own."""
_MANY = {"...", "…"}


def documents() -> list[Path]:
    """Pages, READMEs and what stands at the root."""
    found = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("examples/**/README.md"),
    ]
    return sorted(path for path in found if "docs/decisions" not in path.as_posix())  # which say what was, too


def dead_examples() -> tuple[list[str], int]:
    """What is wrong, each with its document; and how many examples were looked at."""
    wrong: list[str] = []
    seen = 0
    for path in documents():
        text = path.read_text()
        for _, language, body in _BLOCK.findall(text):
            if language == "python":
                seen += 1
                wrong += [f"{path.relative_to(ROOT)}: {fault}" for fault in faults_of_python(body)]
            elif language in ("bash", "text", ""):
                for line in command_lines(body):
                    seen += 1
                    wrong += [f"{path.relative_to(ROOT)}: {fault}" for fault in faults_of_command(line, spelled_out=True)]
        for span in _SPAN.findall(_BLOCK.sub("", text)):
            if re.match(r"(qsync|tox run|python [\w/]+\.py|torchrun)\b", span):
                seen += 1
                wrong += [f"{path.relative_to(ROOT)}: {fault}" for fault in faults_of_command(span, spelled_out=False)]
    return wrong, seen


def command_lines(body: str) -> Iterator[str]:
    """The lines of a shell's block that start something of ours, put together where they are continued."""
    for line in re.sub(r"\\\n\s*", " ", body).splitlines():
        plain = line.strip().removeprefix("$ ")
        words = plain.split()
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if words and words[0] in ("qsync", "torchrun", "python", "python3", "tox", "pip", "accelerate", "QSYNC_GROUP=b"):
            yield plain


def faults_of_command(line: str, *, spelled_out: bool) -> list[str]:
    """What a command line names and is not there; ``spelled_out``: as it is typed, not a mention in a sentence."""
    try:
        words = shlex.split(line.split(" | ")[0].replace("…", "..."), comments=True)
    except ValueError:
        return [f"no shell reads {line!r}"] if spelled_out else []
    if "qsync" in words:
        return _faults_of_qsync(words[words.index("qsync") + 1 :], line)
    if "tox" in words and "-e" in words:
        environments = set(words[words.index("-e") + 1].split(",")) - _MANY
        return [f"tox has no environment {name!r}: {line}" for name in sorted(environments) if name not in _environments()]
    if words[:1] == ["pip"]:
        return _faults_of_pip(words, line)
    scripts = [word for word in words if word.endswith(".py") and word.startswith(_FOLDERS)]
    found = [f"there is no {word}: {line}" for word in scripts if not (ROOT / word).exists()]
    if not found and scripts:
        source = (ROOT / scripts[0]).read_text() + (ROOT / "bench" / "results.py").read_text() * scripts[0].startswith("bench/")
        behind = words[words.index(scripts[0]) + 1 :]
        options = [word.partition("=")[0] for word in behind if re.match(r"--[a-z]", word)]
        found = [f"{scripts[0]} has no {option}: {line}" for option in options if option not in source]
    return found


def _faults_of_qsync(words: list[str], line: str) -> list[str]:
    from qsync_core.cli.root import cli

    context = click.Context(cli, info_name="qsync")
    if not words or words[0] in _MANY or words[0].startswith(("-", "<", "{")) or words[0].endswith(":") or "|" in words[0]:
        return []
    command = cli.get_command(context, words[0])
    if command is None:
        return [f"there is no command {words[0]!r}: {line}"]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    if not command.context_settings.get("allow_interspersed_args", True):  # what stands behind the script is the script's
        own = list(itertools.takewhile(lambda word: not word.endswith(".py"), own))
    options = [word.partition("=")[0] for word in own if re.match(r"--?[a-zA-Z]", word)]
    return [f"qsync {words[0]} has no {option}: {line}" for option in options if option not in known]


def _environments() -> set[str]:
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "tox.ini")
    return {section.partition(":")[2] for section in parser.sections() if section.startswith("testenv:")}


def _faults_of_pip(words: list[str], line: str) -> list[str]:
    found = []
    for word in words:
        path, bracket, extras = word.partition("[")
        if not path.startswith(("packages/", "examples/")):
            continue
        project = ROOT / path / "pyproject.toml"
        if not project.exists():
            found.append(f"there is no package {path}: {line}")
            continue
        defined = tomllib.loads(project.read_text())["project"].get("optional-dependencies", {})
        asked = extras.rstrip("]").split(",") if bracket else []
        found += [f"{path} has no extra {extra!r}: {line}" for extra in asked if extra not in defined]
    return found


def faults_of_python(body: str) -> list[str]:
    """What a block of Python imports, calls and passes that QSync does not have."""
    indent = re.match(r" *", body)
    text = inspect.cleandoc(body) if indent and indent[0] else body
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"no Python: {(error.text or '').strip()!r}"]
    found, names = [], dict[str, object]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in _PACKAGES:
            for alias in node.names:
                known, value = _looked_up(node.module, alias.name)
                names[alias.asname or alias.name] = value
                found += [] if known else [f"{node.module} has no {alias.name}"]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in _PACKAGES:
                    known, value = _looked_up(alias.name, "")
                    names[alias.asname or alias.name.partition(".")[0]] = value
                    found += [] if known else [f"there is no module {alias.name}"]
    if "qsync" not in names:
        names["qsync"] = importlib.import_module("qsync_torch")  # as every page imports it
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            owner = names[node.value.id]
            if inspect.ismodule(owner) and not _looked_up(owner.__name__, node.attr)[0]:
                found.append(f"{owner.__name__} has no {node.attr}")
        if isinstance(node, ast.Call) and (fault := _fault_of_call(node, names)):
            found.append(fault)
    return found


def _looked_up(module: str, name: str) -> tuple[bool, object]:
    """Whether a module has a name, and what it is; the module itself for none."""
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:  # of a trainer that is not installed here, the page's own tests know
        return (error.name or "").partition(".")[0] not in _PACKAGES, None
    if not name:
        return True, loaded
    try:
        return True, getattr(loaded, name)
    except AttributeError:
        try:
            return True, importlib.import_module(f"{module}.{name}")
        except ImportError:
            return False, None
    except ImportError as error:
        return (error.name or "").partition(".")[0] not in _PACKAGES, None


def _fault_of_call(call: ast.Call, names: dict[str, object]) -> str:
    """What is wrong with the arguments' names of a call of something of ours."""
    function, label = None, ""
    if isinstance(call.func, ast.Name):
        function, label = names.get(call.func.id), call.func.id
    elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id in names:
        function, label = getattr(names[call.func.value.id], call.func.attr, None), call.func.attr
    if not callable(function):
        return ""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    unknown = [one.arg for one in call.keywords if one.arg and one.arg not in parameters]
    return f"{label} has no argument {unknown[0]!r}" if unknown else ""
