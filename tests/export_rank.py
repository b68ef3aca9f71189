"""What a framework makes of exported files; run in its runtime:

    python tests/export_rank.py FRAMEWORK WEIGHTS.safetensors CHECKPOINT OUT.json [IMAGES.npy]

Writes how many validation images the model counts right that starts from `model.weights`, and the adapter's logits of
the images (n, height, width, channels) by the checkpoint.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.checkpoint import snapshots
from hvdkit.core import metrics
from hvdkit.core.state import model_state
from hvdkit.recipe import schema
from hvdkit.worker import setup

ROOT = Path(__file__).resolve().parents[1]


def main(framework: str, weights: Path, folder: Path, out: Path, images: Path | None) -> None:
    adapter: Any = adapters.load(framework)
    build = runpy.run_path(str(ROOT / "recipes" / framework / "resnet.py"))["build"]
    found = snapshots.read(folder)
    recipe = schema.revise(found.record.recipe, "test", [f"model.weights={weights}", "seed=99", "device=cpu"])
    begun = setup.start(adapter, setup.RankScript(build), recipe)
    session, dataset, architecture = begun.session(recipe), begun.dataset, begun.architecture
    batch_size, data = recipe.batch_size, begun.mesh.data
    sums, _ = metrics.summed(adapter, session, begun.task.metrics, dataset.val, batch_size, data)
    told: dict[str, Any] = {"correct": round(sums["accuracy"][0])}
    if framework == "pytorch":  # as torchvision's models are loaded
        from safetensors.torch import load_file

        build(architecture).load_state_dict(load_file(weights), strict=True)
    if images:
        session.load_state(model_state(found.state))
        told["logits"] = session.predict(np.load(images)).tolist()
    out.write_text(json.dumps(told))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]), Path(sys.argv[5]) if len(sys.argv) > 5 else None)
