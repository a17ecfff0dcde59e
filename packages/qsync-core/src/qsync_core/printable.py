"""Text that a terminal shows and does not obey: the one place that knows which characters are which."""

from __future__ import annotations

import re
import sys

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and line feed: escape sequences, a carriage return that hides a line
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # reorder what is read
    "\u2028\u2029\ufeff\U000e0000-\U000e007f"  # break lines, or are not seen
    "\ud800-\udfff]"  # no text
)


def is_printable(text: str) -> bool:
    """Whether a terminal shows all of a text as it stands; lines may be several."""
    return text.isprintable() or _OBEYED.search(text) is None


def printable(text: str) -> str:
    """Spell out what a terminal would obey, or show in another place than it stands, as Python escapes it: ``\\x1b``."""
    return text if text.isprintable() else _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def tell(sentence: str) -> None:
    """Print a line on a script's standard error that says whose it is: ``qsync: …``."""
    print(printable(f"qsync: {sentence}"), file=sys.stderr, flush=True)
