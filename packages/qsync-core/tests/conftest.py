"""Makes the modules beside the tests (strategies, examples, mutations) importable, and pins hypothesis to what CI runs."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("qsync-core", deadline=None, derandomize=True)
settings.load_profile("qsync-core")
