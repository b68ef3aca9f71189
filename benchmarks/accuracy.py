"""Validation accuracy of the digits recipe on two ranks, three seeds a framework.

    .venv/bin/python benchmarks/accuracy.py

Writes accuracy.json and accuracy.md beside itself. Runs that are there already are not repeated; `--fresh` starts anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from hvdkit.commands import train
from hvdkit.commands.plan import make_plan
from hvdkit.files import write_atomic
from hvdkit.recipe import schema
from hvdkit.results.machine import this_machine

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "resnet20-digits.yaml"
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")
SEEDS = (1, 2, 3)
NP = 2


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget runs that are done")
    arguments = parser.parse_args()
    path = HERE / "accuracy.json"
    rows = json.loads(path.read_text())["runs"] if path.exists() and not arguments.fresh else []
    for seed in SEEDS:
        for framework in FRAMEWORKS:
            if any((row["framework"], row["seed"]) == (framework, seed) for row in rows):
                continue
            plan = make_plan(schema.load(RECIPE, [f"seed={seed}", "checkpoint=null"]), framework, NP, None, "direct")
            with tempfile.TemporaryDirectory() as folder:
                result = train.run(plan, Path(folder))
            rows.append(result.model_dump(mode="json"))
            print(f"{framework}, seed {seed}: {result.val_accuracy:.4f} in {result.train_s:.0f} s", flush=True)
            report = {"command": "python benchmarks/accuracy.py", "machine": this_machine().model_dump(), "runs": rows}
            write_atomic(path, json.dumps(report, indent=2) + "\n")
    write_atomic(HERE / "accuracy.md", table(rows))


def table(rows: list[dict[str, object]]) -> str:
    """`accuracy.md`."""
    machine = this_machine()
    lines = [
        "# Accuracy on held-out digits",
        "",
        f"`recipes/resnet20-digits.yaml`, {NP} ranks of one thread, seeds {', '.join(map(str, SEEDS))}; one image of "
        "the 360 is 0.28 points. Made by `python benchmarks/accuracy.py`.",
        "",
        "| framework | median | lowest | highest | training, median |",
        "|:---|---:|---:|---:|---:|",
    ]
    for framework in FRAMEWORKS:
        runs = [row for row in rows if row["framework"] == framework]
        accuracies = sorted(100 * float(str(row["val_accuracy"])) for row in runs)
        seconds = statistics.median(float(str(row["train_s"])) for row in runs)
        lines.append(
            f"| {framework} {runs[0]['framework_version']} | {statistics.median(accuracies):.2f} % "
            f"| {accuracies[0]:.2f} % | {accuracies[-1]:.2f} % | {seconds:.0f} s |"
        )
    lines += ["", f"{machine.processor}, {machine.cores} cores, {machine.system}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
