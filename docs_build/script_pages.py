"""mkdocs hook: a line that is a link to a script of examples/, and nothing else, becomes the script.

Read where the repository is hosted, the page has the link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"^\[`(?P<path>examples/\S+\.py)`\]\(\.\./(?P=path)\)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the scripts in."""
    return LINK.sub(
        lambda link: f"`{link['path']}`:\n\n```python\n{(ROOT / link['path']).read_text(encoding='utf-8')}```", markdown
    )
