"""One rank of two that tries a front end of Horovod's: `python rank.py keras horovod.tensorflow.keras [CASE ...]`.

Prints a line `case NAME OUTCOME` for each case: `passed`, or the failure.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
import traceback
from pathlib import Path

from cases import CASES

for file in sorted(Path(__file__).parent.glob("*_cases.py")):
    importlib.import_module(file.stem)


def main() -> None:
    gc.freeze()  # tracing makes many objects; the frameworks' own need not be looked at each time
    gc.enable()
    name, *chosen = sys.argv[2:]
    front_end = importlib.import_module(name)
    front_end.init()
    for case, front_ends in CASES:
        if name not in front_ends or (chosen and case.__name__ not in chosen):
            continue
        started = time.monotonic()
        try:
            case(front_end)
            outcome = "passed"
        except Exception:
            outcome = repr(traceback.format_exc())
        print(f"case {case.__name__} {outcome}", flush=True)
        print(f"{time.monotonic() - started:.1f} s", flush=True)
    front_end.shutdown()


if __name__ == "__main__":
    main()
