"""Makes the modules beside the tests (strategies, examples, mutations) importable, and loads hypothesis's profile."""

import sys
from pathlib import Path

import hypothesis_profiles  # noqa: F401 - loads the profile

sys.path.insert(0, str(Path(__file__).parent))
