"""Runs a script; on rank 1 the installed qsync-torch pretends to be of another version."""

import os
import runpy
import sys
from pathlib import Path

from qsync_torch.distributed import ranks as agreement

if os.environ["RANK"] == "1":
    agreement.versions_text = lambda: "qsync-core 0.1.0, qsync-torch 9.9.9"
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
