"""How equal the four frameworks are: `hvdkit parity` of three recipes, 20 steps in float64 on two ranks each.

    .venv/bin/python -m benchmarks.parities [--recipe gpt-tiny]

Checks that are done are kept in `runs/parities` and not made again; `--fresh` starts anew. Writes parity.json and
parity.md beside itself, and the whole of each check into parity/. The machine may be busy: errors do not depend on it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.results.parity import read_parity

STEPS, RANKS = 20, 2
# The recipe, the folder in parity/, and what is changed of the recipe.
CHECKS: dict[str, tuple[str, list[str]]] = {
    "resnet20-digits": ("resnet20-digits", []),
    "gpt-tiny": ("gpt-tiny", []),
    "resnet50-synthetic": ("resnet50-64px", ["data.height=64", "data.width=64"]),
}


def main() -> None:
    """The command line."""
    parser = harness.parser(__doc__, keep="parities")
    parser.add_argument("--recipe", action="append", choices=list(CHECKS), help="only this one (may be repeated)")
    args = parser.parse_args()
    kept, file = harness.kept(args), args.out / "parity.json"
    checks: dict[str, Any] = json.loads(file.read_text())["checks"] if file.exists() else {}
    for recipe in args.recipe or CHECKS:
        folder, keys = CHECKS[recipe]
        if not (kept / folder / "parity.json").exists():
            harness.say(f"parity of {recipe}")
            asked = ["parity", recipe, *keys, "--steps", str(STEPS), "-np", str(RANKS)]
            harness.hvdkit([*asked, "--out", kept / folder, "--overwrite"], timeout_s=3600)
        checks[recipe] = summary(kept / folder) | {"folder": folder, "measured": written.today()}
        whole = args.out / "parity" / folder
        written.compressed(whole / "parity.json.gz", json.loads((kept / folder / "parity.json").read_text()))
        for name in ("parity.md", "parity.png"):
            shutil.copyfile(kept / folder / name, whole / name)
    made = {name: checks[name] for name in CHECKS if name in checks}
    written.publish("parity", {"ranks": RANKS, "checks": made}, args.out)


def summary(folder: Path) -> dict[str, Any]:
    """What the tables show of a check."""
    found = read_parity(folder / "parity.json")
    frameworks = {row.pop("framework"): row for row in found.records()}
    return {
        **{key: getattr(found, key) for key in ("passed", "batch_size", "steps", "marks")},
        "worst_step_error_f64": max(row["step_f64"] for row in frameworks.values()),
        "frameworks": frameworks,
    }


if __name__ == "__main__":
    harness.exit_with(main)
