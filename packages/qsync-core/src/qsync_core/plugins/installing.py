"""How a package of QSync is installed where it lacks something: from where it came, because no index need have it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def pip_install(package: str, extra: str = "") -> str:
    """The command: ``pip install 'qsync-torch[plan]'``, or of the folder that it was installed from.

    One that is not installed is looked for beside qsync-core's folder.
    """
    path, option = _origin(package)
    if path is None and (beside := _origin("qsync-core"))[0] is not None:
        path, option = beside[0].parent / package, beside[1]
        if not path.is_dir():
            path = None
    extras = f"[{extra}]" if extra else ""
    if path is None:
        return f"pip install '{package}{extras}'" if extra else f"pip install {package}"
    return f"pip install {option}'{path}{extras}'"


def _origin(package: str) -> tuple[Path | None, str]:
    """Where a package was installed from, and pip's option; None where an index had it, or it is not installed."""
    try:
        text = metadata.distribution(package).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    told = json.loads(text) if text else {}
    url = urlsplit(told.get("url", ""))
    if url.scheme != "file":
        return None, ""
    return Path(url2pathname(url.path)), "-e " if told.get("dir_info", {}).get("editable") else ""
