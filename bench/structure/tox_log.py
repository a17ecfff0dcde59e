"""Row S9 from what tox prints at its end: how long each environment took to be set up, and its commands."""

from __future__ import annotations

import re

import attrs

_ENVIRONMENT = re.compile(r"^\s*([\w-]+): (OK|SKIP|FAIL.*?) \(([\d.]+)=setup\[([\d.]+)\]\+cmd\[[\d.,]*\] seconds\)", re.MULTILINE)
_END = re.compile(r"^\s*(?:congratulations :\)|evaluation failed :\() \(([\d.]+) seconds\)", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@attrs.frozen
class ToxRun:
    """A run of all environments.

    Attributes:
        whole_s: from its beginning to its end.
        commands_s: by environment, what its commands took.
    """

    whole_s: float
    commands_s: dict[str, float]


def read_tox_log(text: str) -> ToxRun:
    """The run whose output this is; of several, the last.

    Raises:
        ValueError: when it has not come to its end, or when an environment has failed, which its name says.
    """
    text = _COLOUR.sub("", text)
    ends = list(_END.finditer(text))
    if not ends:
        raise ValueError("this is not what 'tox run' prints to its end: the line with the seconds of all environments is missing")
    began = ends[-2].end() if len(ends) > 1 else 0
    found = list(_ENVIRONMENT.finditer(text, began, ends[-1].start()))
    if failed := [one[1] for one in found if one[2] != "OK"]:
        raise ValueError(f"{', '.join(failed)} failed, and a test command that fails is not measured: mend it, and run it again")
    return ToxRun(float(ends[-1][1]), {one[1]: float(one[3]) - float(one[4]) for one in found})
