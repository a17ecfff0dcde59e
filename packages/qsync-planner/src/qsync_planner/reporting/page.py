"""A page for readers as one HTML file that needs no network: sentences, tables, and charts that the browser draws (Vega-Lite).

What a page shows is values; ``page.html.j2`` is the only place that knows HTML.  Names in artifacts are anybody's, so the template
escapes all text, charts get their data as JSON, and the page's content security policy allows the two scripts that are its own.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import attrs

from qsync_core.artifacts.atomic_file import write_atomically
from qsync_core.artifacts.own_folder import make_own, why_untrusted
from qsync_core.errors import PlanError
from qsync_core.plugins.installing import pip_install
from qsync_core.printable import printable
from qsync_core.tuning.store import default_store_path

_NEEDS = ("jinja2", "vl_convert")


def is_installed() -> bool:
    """Whether pages can be written here."""
    return all(find_spec(name) is not None for name in _NEEDS)


def require_pages() -> None:
    """Ask before the work is done that a page is to show.

    Raises:
        PlanError: when the extra ``report`` is not installed.
    """
    if not is_installed():
        raise PlanError(
            f"a page needs qsync-planner's extra 'report', which is not installed: {pip_install('qsync-planner', 'report')}"
        )


@attrs.frozen
class Key:
    """One entry of a legend: a CSS colour and what it stands for; ``hollow`` and ``hatched`` as the marks are."""

    colour: str
    text: str
    style: str = ""


@attrs.frozen
class Figure:
    """A chart.

    Attributes:
        chart: a Vega-Lite specification.
        says: the sentence that stands for it where it cannot be seen.
    """

    chart: Mapping[str, Any]
    says: str
    legend: Sequence[Key] = ()
    note: str = ""
    kind = "figure"


@attrs.frozen
class Table:
    """Rows of texts.

    Attributes:
        rows: each as long as the header; a cell may have several lines.
        words: columns of words, which stand on the left; all others are numbers.
        summary: where there is one, the table is folded away behind it.
        note: below the table.
        anchor: rows are ``anchor-1``, ``anchor-2`` and so on, where charts lead to them.
        code: columns of what a person types.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset((0,))
    summary: str = ""
    note: str = ""
    anchor: str = ""
    code: frozenset[int] = frozenset()
    kind = "table"


@attrs.frozen
class Lines:
    """What a person types, as a terminal has it."""

    text: str
    kind = "lines"


@attrs.frozen
class Section:
    """A title, sentences, and figures, tables and lines."""

    title: str
    sentences: Sequence[str] = ()
    parts: Sequence[Figure | Table | Lines] = ()


@attrs.frozen
class Fact:
    """A figure to see at first sight: its name, its value, and what to compare it with."""

    name: str
    value: str
    beside: str = ""


@attrs.frozen
class Page:
    """All of it.

    Attributes:
        about: below the title, what the page is of.
    """

    title: str
    sections: Sequence[Section]
    verdict: str = ""
    facts: Sequence[Fact] = ()
    about: str = ""


def render(page: Page) -> str:
    """The whole page as HTML.

    Raises:
        PlanError: when the extra ``report`` is not installed.
    """
    require_pages()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=_files(),
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    scripts = [_drawing_script()] if any(part.kind == "figure" for section in page.sections for part in section.parts) else []
    return environment.get_template("page.html.j2").render(page=page, scripts=scripts, script_hashes=[_hash(s) for s in scripts])


def _files() -> Any:
    import jinja2

    folder = resources.files(__package__)
    return jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8"))


@functools.cache
def _drawing_script() -> str:
    """Vega, Vega-Lite and Vega-Embed, and ``page.js``, which draws with them.

    A script ends at the first ``</script``, wherever that stands; in a string it means the same with a backslash.
    """
    own = resources.files(__package__).joinpath("page.js").read_text("utf-8")
    return _bundled(own).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _bundled(own: str) -> str:
    """A script with what it imports.  Bundling takes seconds: the result stays in the user's cache folder."""
    import vl_convert

    name = hashlib.sha256(f"{version('vl-convert-python')}\n{own}".encode()).hexdigest()
    folder, file = default_store_path().parent / "pages", f"{name[:24]}.js"
    with contextlib.suppress(OSError):
        folder = make_own(folder)
        if why_untrusted(folder) is None:  # what others can write there is no script of ours
            digest, _, script = (folder / file).read_bytes().partition(b"\n")
            if digest.decode("ascii", "replace") == hashlib.sha256(script).hexdigest():
                return script.decode()
    made: str = vl_convert.javascript_bundle(own)
    with contextlib.suppress(OSError):  # without a cache, the next page takes as long
        write_atomically(folder / file, f"{hashlib.sha256(made.encode()).hexdigest()}\n{made}".encode())
    return made


def _hash(script: str) -> str:
    """Hash a script as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
