"""A real comparison's files (tests/data/comparison), and what tests make of a copy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

REAL = Path(__file__).parent / "data" / "comparison"
NAMES = ["pytorch", "tensorflow", "keras", "mxnet"]


def change(folder: Path, revise: Callable[[dict[str, Any]], None]) -> None:
    """Change compare.json."""
    document = json.loads((folder / "compare.json").read_text())
    revise(document)
    (folder / "compare.json").write_text(json.dumps(document))


def several_rounds(document: dict[str, Any]) -> None:
    """Five rounds of each run with a rival beside those of two ranks, made up from the real ones."""
    runs, ratios = [], []
    for result in document["runs"]:
        for rival, factor in [(None, 1.0), *([("other", 0.8)] if result["np"] == 2 else [])]:
            for round_ in range(1, 6):
                speed = result["images_per_second"] * factor * (1 + 0.01 * (round_ - 3))
                steps = [result["step_ms_p50"] * (1 + 0.002 * place) for place in range(50)]
                more = {"step_ms": steps, "step_ms_p99": steps[-1], "startup_s": 10.0, "cpu_s_per_image": 0.004}
                one = {"rival": rival, "round": round_, "images_per_second": speed, "load": 0.02, "noisy": round_ == 5}
                runs.append(
                    result | one | more | {"tuning": {"cycle_time_ms": {"value": 5, "why": "most images/s of three"}}}
                )
        if result["np"] == 2:
            figures = {"median": 1.25, "low": 1.2, "high": 1.3, "rounds": 5, "confidence": 0.9375, "verdict": "faster"}
            ratios.append({"framework": result["framework"], "np": 2, "against": "other"} | figures)
    now = {"median": 0.9, "low": 0.88, "high": 0.92, "rounds": 5, "old_rounds": 3, "margin": 0.05}
    rows = [now | {"framework": "keras", "np": 2, "rival": "other", "verdict": "worse"}]
    document |= {"runs": runs, "ratios": ratios, "rounds": 5, "baseline": rows}
