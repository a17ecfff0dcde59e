"""How well indicators agree with the measured truth: rows I1 to I5 of ``docs/results/indicator.json``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
