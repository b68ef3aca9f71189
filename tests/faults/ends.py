"""A run of points of which some ranks end as PLANTED says (planted.py); `top` is the top of this script."""

import os
import sys
from pathlib import Path

from planted import plant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "debugging"))

if __name__ == "__main__":
    plant(os.environ["PLANTED"])

import sound

from hvdkit.adapters import pytorch  # noqa: F401 - tests/warm looks for this line

if __name__ == "__main__":
    sound.run(sound.Points)
