"""Row W6: pages of the documentation without a way to them from their user's start, dead examples, and pages that are too large.

The site is built as ``tox run -e docs`` builds it.  A way is a chain of links in pages' own text: the navigation beside it, which
lists everything, is none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

from journey.examples import dead_examples

ROOT = Path(__file__).parents[2]
LARGEST = 150_000
"""Bytes of a page's HTML, as the site's own check has it (docs_build/page_sizes.py)."""
USERS = {
    "Train": "you-have-a-training-script",
    "Operate": "you-run-the-machines",
    "Extend": "you-extend-it",
    "Understand": "you-want-to-understand-it",
}
"""A user's section of mkdocs.yml's navigation, and the heading of the first page under which this user starts."""


def rows() -> Iterator[dict[str, Any]]:
    """Build the site and look at it."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        _build(site)
        lost, clicks = _without_way(site)
        sizes = {page.relative_to(site).as_posix(): page.stat().st_size for page in site.rglob("*.html")}
    large = [f"{page}: {size}" for page, size in sizes.items() if size > LARGEST]
    largest, farthest = max(sizes, key=lambda page: sizes[page]), max(clicks, key=lambda page: clicks[page])
    yield {
        "id": "W6",
        "what": f"pages of the documentation, of {len(sizes)}, without a way to them by links in the text: those of a user's "
        "section of the navigation from that user's heading of the first page, all others from anywhere on it",
        "value": len(lost),
        "unit": "pages",
        "spread": "; ".join(lost) or f"the farthest is {clicks[farthest]} clicks away: {farthest}",
        "target": "0",
    }
    dead, seen = dead_examples()
    yield {
        "id": "W6b",
        "what": f"dead examples among {seen} (commands of qsync, python, tox and pip, and blocks of Python, in the documentation "
        "and the READMEs): a command, an option, a file, an environment, an import, a name or an argument that is not there",
        "value": len(dead),
        "unit": "examples",
        "spread": "; ".join(dead),
        "target": "0",
    }
    yield {
        "id": "W6c",
        "what": f"pages of more than {LARGEST // 1000} KB",
        "value": len(large),
        "unit": "pages",
        "spread": "; ".join(large) or f"the largest, {largest}, has {sizes[largest]} bytes",
        "target": "0",
    }


def _build(site: Path) -> None:
    """Build as CI does, but for the check of sizes, which is a row here."""
    settings = (ROOT / "mkdocs.yml").read_text()
    own = ROOT / "mkdocs.measured.yml"
    own.write_text(settings.replace("  - docs_build/page_sizes.py\n", ""))
    try:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(own), "--site-dir", str(site)]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
        )
    finally:
        own.unlink()
    if done.returncode:
        raise SystemExit(f"the documentation does not build:\n{done.stdout}{done.stderr}")


class _Article(HTMLParser):
    """The links of a page's own text, by the heading of the second level above them."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, list[str]] = {"": []}
        self._depth, self._heading = 0, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag == "article":
            self._depth += 1
        elif self._depth and tag == "h2":
            self._heading = known.get("id") or ""
            self.links.setdefault(self._heading, [])
        elif self._depth and tag == "a" and (link := known.get("href")):
            self.links[self._heading].append(link)

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"


def _links(site: Path, page: str) -> dict[str, set[str]]:
    """The pages that a page leads to, by heading."""
    article = _Article()
    article.feed((site / page).read_text())
    found: dict[str, set[str]] = {}
    for heading, links in article.links.items():
        local = [unquote(urldefrag(link).url) for link in links if "://" not in link]
        there = [os.path.normpath(os.path.join(os.path.dirname(page), link)) for link in local if link.endswith(".html")]
        found[heading] = set(there)
    return found


def _without_way(site: Path) -> tuple[list[str], dict[str, int]]:
    """Pages that a user does not find, each with its user; and how many clicks every page is away from its start."""
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html", "index.html"}
    leads = {page: set().union(*_links(site, page).values()) for page in pages}
    first = _links(site, "index.html")
    if missing := [heading for heading in USERS.values() if heading not in first]:
        raise SystemExit(f"the first page has no heading {missing[0]!r}, where a user starts")
    of_user = {user: _reached(first[heading], leads) for user, heading in USERS.items()}
    anywhere = _reached(set().union(*first.values()), leads)
    lost, clicks, owned = [], {}, set()
    for user, section in _sections().items():
        for page in section:
            owned.add(page)
            reached = of_user.get(user, anywhere)
            if page in reached:
                clicks[f"{page} ({user})"] = reached[page]
            elif page != "index.html":
                lost.append(f"{user}: {page}")
    for page in sorted(pages - owned):
        if page in anywhere:
            clicks[page] = anywhere[page]
        else:
            lost.append(page)
    return lost, clicks


def _reached(start: set[str], leads: Mapping[str, set[str]]) -> dict[str, int]:
    """The pages that links lead to, and by how many clicks."""
    found, waiting, click = dict[str, int](), start, 1
    while waiting:
        found |= dict.fromkeys(waiting, click)
        waiting = {page for before in waiting for page in leads.get(before, ())} - set(found)
        click += 1
    return found


def _sections() -> dict[str, list[str]]:
    """Pages that mkdocs.yml lists for each user, as HTML."""
    text = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n", 1)[1]
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if heading := re.fullmatch(r"  - (\w+):", line):
            found[heading[1]] = []
        elif (page := re.fullmatch(r"      - (\S+)\.md", line)) and found:
            [*_, user] = found
            found[user].append(f"{page[1]}.html")
    return {user: pages for user, pages in found.items() if user in USERS}
