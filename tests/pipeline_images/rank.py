"""One rank of four that trains a ResNet in stages or parts, beside the whole model on the microbatches of all ranks:

python tests/pipeline_images/rank.py FRAMEWORK REPORT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import adapters
from hvdkit.core.group import Mesh, sets
from hvdkit.core.state import digest, is_statistic
from hvdkit.recipe.schema import Sgd
from hvdkit.tasks import resnet
from tests.pipeline.pair import ADAMW, RANKS, STEPS, Pair, batch
from tests.tensor.rank import far, most

TABLE = replace(resnet.architecture("resnet20", 10), dtype="float64", compute_dtype="float64")
DEEP = replace(resnet.architecture("resnet50", 10), dtype="float64", compute_dtype="float64")
# Two blocks have projections. Without the pooling, the last maps have more than a pixel for batch norm.
BOTTLENECKS = replace(DEEP, blocks=DEEP.blocks[:4], features=512, max_pool=False)
SGD = Sgd(learning_rate=0.01, momentum=0.9, weight_decay=0.01, clip_norm=0.5)


def trained(
    framework: str, mesh: Mesh, schedule: str = "1f1b", synchronized: bool = False, table: resnet.ResNet = TABLE
) -> dict[str, Any]:
    """Errors of each of the forced steps, of others without a teacher, and of evaluations."""
    pair = Pair(framework, mesh, schedule, SGD, table=table, synchronized=synchronized)
    loaded = pair.stages.state()
    gradients, weights = [], []
    for number in range(STEPS):
        pair.stages.load_state(pair.whole.state())
        gradients.append(pair.step(number))
        weights.append(pair.after())
    if mesh.data.size > 1 and not synchronized:  # each data rank has the statistics of its own samples
        weights = [{name: error for name, error in each.items() if not is_statistic(name)} for each in weights]
    recompute = "recompute" in adapters.load(framework).CAPABILITIES
    free = Pair(framework, mesh, schedule, ADAMW, recompute=recompute, table=table, synchronized=synchronized)
    free.step(0, 2)
    pair.stages.load_state(pair.whole.state())
    seen = batch(99, mesh.data.index, table)
    outputs = [session.predict(seen.inputs) for session in (pair.stages, pair.whole)]
    losses = [session.losses(seen) for session in (pair.stages, pair.whole)]
    return {
        "gradients": most(gradients),
        "weights": most(weights),
        "free": {name: error for name, error in free.after().items() if name in pair.whole.shapes},
        "evaluation": {"outputs": far(*outputs), "losses": far(*losses)},
        "loaded": all(np.array_equal(loaded[name], pair.start[name]) for name in pair.start),
        "own": sorted(pair.stages.trainable.parameters) + sorted(pair.stages.trainable.buffers),
        "digest": [digest(session.model_arrays()) for session in (pair.stages, pair.whole)],
    }


def main(framework: str, report: Path, *cases: str) -> None:
    adapter = adapters.load(framework)
    sizes = ((2, 1), (4, 1), (1, 4), (1, 2), (2, 2))  # of the pipeline and tensor axes
    wanted = dict.fromkeys(ranks for axes in sizes for ranks in sets(RANKS, *axes))
    world = adapter.init("cpu", threads=1, sets=list(wanted))
    meshes = {axes: Mesh(world, *axes, adapter.process_set) for axes in sizes}
    asked: dict[str, Callable[[], dict[str, Any]]] = {
        "1f1b 4": lambda: trained(framework, meshes[4, 1], "1f1b"),
        "4 parts": lambda: trained(framework, meshes[1, 4]),
        "gpipe 2": lambda: trained(framework, meshes[2, 1], "gpipe"),
        "1f1b 2 synchronized": lambda: trained(framework, meshes[2, 1], "1f1b", synchronized=True),
        "interleaved 4": lambda: trained(framework, meshes[4, 1], "interleaved"),
        "2 parts synchronized": lambda: trained(framework, meshes[1, 2], synchronized=True),
        "1f1b 2 in parts": lambda: trained(framework, meshes[2, 2], table=BOTTLENECKS),
    }
    found = {case: asked[case]() for case in cases}
    everyone = adapter.allgather_object(found, meshes[2, 1].world, name="report")
    if world.rank == 0:
        report.write_text(json.dumps(everyone))
    adapter.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
