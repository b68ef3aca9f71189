"""What `tools.py` gives to the commands that it times: a comparison as large as they usually come, and a profile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdkit.baselines.registry import RIVALS

HERE = Path(__file__).resolve().parent
SMALL = HERE.parent / "tests" / "data" / "comparison"  # four frameworks at one and two ranks, one round
ROUNDS = 5


def large(folder: Path) -> Path:
    """A comparison of four frameworks at one and two ranks with every rival, in five rounds, made from the real one.

    That is what `make bench-resnet50` leaves, with scaling beside it.
    """
    document = json.loads((SMALL / "compare.json").read_text())
    real, document["runs"], document["rounds"] = document["runs"], [], ROUNDS
    for number in range(1, ROUNDS + 1):
        for result, rival in _kinds(real):
            document["runs"].append(_run(folder, result, rival, number))
    document["ratios"] = [
        {"framework": result["framework"], "np": 2, "against": rival, "median": 1.2, "low": 1.1, "high": 1.3}
        | {"rounds": ROUNDS, "confidence": 0.9375, "verdict": "faster"}
        for result, rival in _kinds(real)
        if rival
    ]
    (folder / "compare.json").write_text(json.dumps(document, indent=2))
    return folder


def profile(path: Path) -> Path:
    """A measured profile: PyTorch, ResNet-20, two hosts."""
    profiles = json.loads((HERE / "own-hosts-profiles.json").read_text())
    path.write_text(json.dumps(profiles["pytorch"]["dense"]))
    return path


def _kinds(real: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Each real run, and those of two ranks once more for each rival that its framework has."""
    for result in real:
        yield result, None
        if result["np"] == 2:
            for name, rival in RIVALS.items():
                if result["framework"] in rival.frameworks:
                    yield result, name


def _run(folder: Path, result: dict[str, Any], rival: str | None, number: int) -> dict[str, Any]:
    """One run's folder, with lines and recipe of the real one; its result."""
    factor = (0.8 if rival else 1.0) * (1 + 0.01 * (number - 3))
    title = f"{result['framework']}-np{result['np']}"
    place = folder / "runs" / f"{title}{f'-{rival}' if rival else ''}-round{number}"
    shutil.copytree(SMALL / "runs" / title, place)
    made = result | {
        "rival": rival,
        "round": number,
        "images_per_second": factor * result["images_per_second"],
        "step_ms": [result["step_ms_p50"] * (1 + 0.002 * step) for step in range(200)],
        "step_ms_p99": result["step_ms_p90"],
        "startup_s": 5.0 + number,
        "cpu_s_per_image": 0.004 / factor,
    }
    (place / "result.json").write_text(json.dumps(made))
    return made
