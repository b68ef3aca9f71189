"""Where `order: priority` pays: steps over slow links, measured beside predicted.

    .venv/bin/python -m benchmarks.order --model resnet50 --per-second 1.3333 --mbit-per-s 100

Four hosts with slow links (`tests/cluster/hosts.py`), a rank on each, whose device sleeps for the time that each layer
takes at so many images a second (`order_task.py`): so what is compared is when gradients are sent, and forwards begin.
Prints, for gradients after backward (`none`), during it (`overlap`) and in order (`priority`), the median step of each
round, and the step that `hvdkit predict` foresees over links of the cluster file starved-100mbit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import hvdkit
from benchmarks.harness import say
from hvdkit.simulator.workload import of_profile
from tests.cluster.hosts import Network

RANKS, BATCH = 4, 16
POLICIES = {"none": "grouped", "overlap": "horovod", "priority": "priority"}
EFFICIENCY = 0.91  # of the links' rate, as in starved-100mbit


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--per-second", type=float, required=True, help="images that a device trains on a second")
    parser.add_argument("--mbit-per-s", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=5, help="of a run; the first two are left out")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-order"))
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    profile = hvdkit.published_profile(
        asked.model, images_per_second=asked.per_second, batch_size=BATCH, device="a100", out=out / "profile",
        overwrite=True,
    )  # fmt: skip
    work = of_profile(profile)
    layers = []
    for name, forward_s in work.forward:
        mine = [tensor for tensor in work.tensors if tensor.layer == name]
        layers.append([forward_s, sum(each.segment_s for each in mine), [list(each.shape) for each in reversed(mine)]])
    (out / "layers.json").write_text(json.dumps(layers))
    links = [f"link.net.mbit_per_s={EFFICIENCY * asked.mbit_per_s}", "jitter=0"]
    for how, policy in POLICIES.items():
        foreseen = hvdkit.predict(
            out / "profile" / "profile.json", cluster="starved-100mbit", ranks=[RANKS], policy=policy, settings=links,
            out=out / f"predicted-{how}", overwrite=True,
        )  # fmt: skip
        say(f"{how}: predicted {foreseen.points[0].step_ms / 1e3:.2f} s")
    with Network(RANKS, asked.mbit_per_s) as network:
        for number in range(asked.rounds):
            for how in POLICIES:
                say(f"{how}, round {number + 1}: measured {_measured(asked, network, out, how):.2f} s")


def _measured(asked: argparse.Namespace, network: Network, out: Path, how: str) -> float:
    """The median step of a run, in seconds."""
    recipe = {
        "name": "order",
        "model": {
            "name": "own",
            "script": str(Path(__file__).with_name("order_task.py")),
            "options": {"layers": str(out / "layers.json"), "overlap": how == "overlap"},
        },
        "data": {"name": "own"},
        "batch_size": BATCH,
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
        "checkpoint": None,
        "steps": asked.steps,
        "warmup_steps": 1,
        "threads": 1,
        "order": "priority" if how == "priority" else "none",
    }
    (out / f"{how}.yaml").write_text(json.dumps(recipe))
    words = [".venv/bin/hvdkit", "train", str(out / f"{how}.yaml"), "--framework", "pytorch", "-np", str(RANKS)]
    words += ["-H", network.hosts_option(), "--out", str(out / how), "--overwrite"]
    words += ["--stall-timeout", "900"]  # the initial weights cross the links
    network.run(words, check=True)
    steps: list[float] = json.loads((out / how / "result.json").read_text())["step_ms"]
    return median(steps[1:]) / 1e3


if __name__ == "__main__":
    main()
