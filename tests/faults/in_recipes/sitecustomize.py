"""Plants PLANTED (../planted.py) in ranks of a recipe that have this folder in PYTHONPATH."""

import os
import sys
from pathlib import Path

if os.environ.get("HVDKIT_TRACE", "").startswith("rank"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from planted import plant

    plant(os.environ["PLANTED"])
    del sys.path[0]
