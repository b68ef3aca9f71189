"""Profiles at three batch sizes, from which `make validate` leaves one out and predicts it: batch-sizes.json.gz.

    make bench-batch-sizes      (or: .venv/bin/python -m benchmarks.batch_sizes [--rounds 3] [--framework pytorch])

`hvdkit profile resnet20-digits --batch-sizes 8,16,32`, one rank of one thread on MNIST's 5,000 images, under PyTorch
and MXNet by turns. A round that is done is kept in `runs/batch-sizes`. Needs a quiet machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.results.profile import load as load_profile

ROUNDS, SIZES = 3, (8, 16, 32)
RECIPE, KEYS = "resnet20-digits", ["data={name: mnist5k}", "threads=1"]
TIMEOUT_S = 420.0
_OF_A_ROUND = ("step", "tensors", "layers", "batches")  # what differs between profiles of the same recipe


def main() -> None:
    """The command line."""
    args = harness.parser(__doc__, ROUNDS, keep="batch-sizes", frameworks=True).parse_args()
    frameworks = args.framework or ["pytorch", "mxnet"]
    found = harness.rounds(harness.kept(args), frameworks, ["profile"], args.rounds, profiled)
    outcome = {
        **written.facts("make bench-batch-sizes"),
        "setting": {"recipe": RECIPE, "keys": KEYS, "batch_sizes": SIZES},
        "profiles": {framework: [_shortened(one["profile"], number) for number, one in enumerate(rounds)]
                     for framework, rounds in found.items()},
    }  # fmt: skip
    written.compressed(args.out / "batch-sizes.json.gz", outcome)
    print(f"written to {args.out}: {', '.join(frameworks)}; now `make validate`")


def profiled(framework: str, _: int, __: str, folder: Path) -> dict[str, Any]:
    """The profile with all batch sizes."""
    options = ["--framework", framework, "-np", "1", "--steps", "40", "--out", str(folder)]
    options += ["--batch-sizes", ",".join(map(str, SIZES))]
    harness.hvdkit(["profile", RECIPE, *options, *KEYS, "warmup_steps=4"], TIMEOUT_S)
    return load_profile(folder / "profile.json").model_dump(mode="json")


def _shortened(profile: dict[str, Any], number: int) -> dict[str, Any]:
    """The first profile in full, of each other one what is its own."""
    return {key: profile[key] for key in _OF_A_ROUND} if number else profile


if __name__ == "__main__":
    harness.exit_with(main)
