"""Loads the job that a command names: one of :mod:`qsync_torch.models`, or a function in the user's file or module."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import click
import torch

from qsync_core.errors import JobError, QSyncError
from qsync_torch.job import Job
from qsync_torch.models import NAMED


@contextlib.contextmanager
def job_code(job: str) -> Iterator[None]:
    """Surround what runs code of a job: it cannot end the program as if all were well, nor print into a command's result.

    What the job prints goes to standard error.  ``os._exit`` ends the process without a word to anyone and is beyond this.

    Raises:
        JobError: when the job's code calls ``sys.exit``, naming the line.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (SystemExit, click.exceptions.Exit) as error:
        code = error.code if isinstance(error, SystemExit) else error.exit_code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise JobError(
            f"{job} ended the program with sys.exit({code!r}) in {frame.name} ({frame.filename}, line {frame.lineno}) before the "
            "command was done; remove that call, or raise an error that says what is wrong"
        ) from error


def is_script(job: str, arguments: Sequence[str] = ()) -> bool:
    """Whether a job is what a script says at its line, and not a function of a file.

    Raises:
        QSyncError: arguments are given to a job that is no script.
    """
    if job.endswith(".py") and ".py:" not in job:
        return True
    if arguments:
        raise QSyncError(f"{job} takes no arguments ({' '.join(arguments)}): they are for a script; options go before --")
    return False


def load_job(text: str, batch_size: int | None = None) -> Job:
    """The job that a text names.

    Args:
        text: a named model with options, ``resnet50`` or ``bert-base:seq=384,layers=2`` (see :mod:`qsync_torch.models`); or
            ``path/to/file.py:function`` or ``package.module:function``, a function without required arguments that returns a
            :class:`Job`, or the tuple ``(model, batch, loss, optimizer)`` of its fields.  Options after a second colon are
            passed to the function as keyword arguments.
        batch_size: overrides the job's own.

    Raises:
        JobError: naming what is wrong: an unknown name or option, a file that is not there, a function that fails or
            returns something else.
    """
    job = find_job(text)()
    return job if batch_size is None else attrs.evolve(job, batch_size=batch_size)


def find_job(text: str) -> Callable[[], Job]:
    """What makes the job that a text names, before any of the user's code runs.

    Raises:
        JobError: naming what no job can be called.
    """
    head, _, rest = text.partition(":")
    by_spelling = {name.replace("_", "-"): name for name in NAMED}  # vgg16_bn, as in torchvision, and vgg16-bn are the same
    name = by_spelling.get(head.replace("_", "-"))
    if name is not None:
        return partial(_call_with_options, NAMED[name], rest, f"the model {name!r}")
    if rest:
        # A drive letter or a path may hold colons: the last part without '=' is the function.
        target, options = text, ""
        if "=" in text.rpartition(":")[2]:
            target, _, options = text.rpartition(":")
        location, _, function_name = target.rpartition(":")
        if not location:
            raise JobError(f"no function in {text!r}; write 'file.py:function' or 'package.module:function'")
        return partial(_from_function, location, function_name, options)
    if text.endswith(".toml"):
        raise JobError(
            f"{text} is a cluster file, and no job: give it with --cluster, and here a script, a model or 'file.py:function'"
        )
    known = ", ".join(NAMED)
    raise JobError(f"no model is named {text!r}; known are {known}, or write 'file.py:function' for your own")


def _from_function(location: str, function_name: str, options: str) -> Job:
    where = f"{location}:{function_name}"
    function = getattr(_import(location), function_name, None)
    if not callable(function):
        raise JobError(f"{location} has no function {function_name!r}{_as_script(location)}")
    made = _call_with_options(function, options, where)
    if isinstance(made, Job):
        return made
    if isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], torch.nn.Module) and all(map(callable, made[1:])):
        return Job(function_name, *made)
    raise JobError(
        f"{where} must return a Job or the tuple (model, batch, loss, optimizer) of a torch.nn.Module and three callables, "
        f"got {_describe(made)}"
    )


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(part).__name__ for part in value) + ")"
    return type(value).__name__


def _import(location: str) -> ModuleType:
    path = Path(location)
    try:
        if path.suffix != ".py":
            return importlib.import_module(location)
        if not path.is_file():
            raise JobError(f"there is no file {location!r}")
        name = f"qsync_job_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and the like look their module up by name
        sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does, so that it finds its neighbours
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.resolve().parent))
        return module
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"importing {location} failed: {type(error).__name__}: {error}{_as_script(location)}") from error


def _as_script(location: str) -> str:
    """What to do about a file that is a script with its line."""
    path = Path(location)
    has_line = path.suffix == ".py" and path.is_file() and b"hybrid(" in path.read_bytes()
    return (
        f"; as a script with the line qsync.hybrid(...) it is prepared without a function: qsync prepare {location}"
        if has_line
        else ""
    )


def _call_with_options(function: Callable[..., Any], options: str, what: str) -> Any:
    parameters = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, separator, text = part.partition("=")
        if not separator or key not in parameters:
            raise JobError(
                f"{what} has no option {part!r}; options are written key=value, known keys: {', '.join(parameters) or 'none'}"
            )
        values[key] = _parse_option(text, parameters[key].default, f"option {key} of {what}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [name for name in missing if name not in values]
    if missing:
        raise JobError(f"{what} needs a value for {', '.join(missing)}; give it as an option, key=value")
    try:
        return function(**values)
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"{what} failed: {type(error).__name__}: {error}") from error


def _parse_option(text: str, default: Any, what: str) -> Any:
    if isinstance(default, bool):
        try:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        except KeyError:
            raise JobError(f"{what} is true or false, got {text!r}") from None
    for kind in (int, float):
        if isinstance(default, kind):
            try:
                return kind(text)
            except ValueError:
                raise JobError(f"{what} is {'an integer' if kind is int else 'a number'}, got {text!r}") from None
    return text
