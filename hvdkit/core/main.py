"""What every recipe script does once its framework is loaded: one rank of a run, from command line to result."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import hvdkit
from hvdkit import config
from hvdkit.config import Recipe
from hvdkit.core import metrics, parity, resnet
from hvdkit.core.adapter import Adapter, Session
from hvdkit.core.data import Dataset, open_dataset
from hvdkit.core.lifeline import Lifeline, lost_a_peer
from hvdkit.core.loop import Loop
from hvdkit.core.precision import PRECISIONS, check_can
from hvdkit.core.state import digest, parameters_of
from hvdkit.core.topology import Topology, threads_per_rank
from hvdkit.errors import HvdkitError, RequestError
from hvdkit.files import write_atomic
from hvdkit.results import TrainResult

Build = Callable[[resnet.ResNet], Any]


def main(adapter: Adapter, build: Build, argv: list[str]) -> NoReturn:
    """Run one rank and end its process. `build` makes the framework's network from the architecture table.

    The exit status is 0, 1 where the run failed, 2 where the request was wrong; the fault is told on standard error.
    The process ends without the interpreter's own farewell: everything is written by then, and threads of TensorFlow
    and Horovod have been seen to hang it.
    """
    try:
        status = _run(adapter, build, argv)
    except SystemExit as leaving:  # at once too: a slow farewell would let its peers fail before it
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(adapter: Adapter, build: Build, argv: list[str]) -> int:
    lifeline = Lifeline()
    try:
        arguments = _parse(argv)
        recipe = config.load(arguments.recipe, arguments.overrides)
        if arguments.parity:
            part = parity.Part(arguments.parity, arguments.steps, arguments.leads)
            compare(adapter, build, recipe, part, lifeline)
        else:
            train(adapter, build, recipe, arguments.out, lifeline)
    except HvdkitError as error:
        lifeline.failed("request" if isinstance(error, RequestError) else "error", str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except Exception as error:
        if lost_a_peer(error):
            lifeline.failed("communication", str(error))
            print(f"error: another rank is gone: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return 1
        lifeline.failed("error", f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def train(adapter: Adapter, build: Build, recipe: Recipe, out: Path | None, lifeline: Lifeline) -> TrainResult:
    """Train as the recipe says; rank 0 writes `metrics.jsonl` and `result.json` into `out`, where one is given.

    Raises RequestError where framework, device, network or data do not allow what the recipe asks, RunError where a
    file cannot be written or ranks come to differ; what Horovod and the framework raise passes.
    """
    topology, dataset, network = _start(adapter, recipe)
    session = open_session(adapter, build, network, recipe)
    adapter.broadcast_state(session, root_rank=0)
    initial = {name: value for name, value in adapter.state(session).items() if not name.startswith("optimizer.")}

    metrics_file = metrics.MetricsFile(out / "metrics.jsonl" if out and topology.is_root else None)
    loop = Loop(adapter, session, recipe, topology, dataset, metrics_file, lifeline.beat)
    started = time.perf_counter()
    adapter.fit(session, loop)
    train_s = time.perf_counter() - started

    lifeline.beat("gathering the result")
    result = _result(adapter, recipe, topology, loop, network, session, digest(initial), train_s)
    if topology.is_root:
        print(result.model_dump_json(indent=2), flush=True)
        if out:
            write_atomic(out / "result.json", result.model_dump_json(indent=2) + "\n")
    lifeline.beat("leaving Horovod")
    adapter.shutdown()
    return result


def compare(adapter: Adapter, build: Build, recipe: Recipe, part: parity.Part, lifeline: Lifeline) -> None:
    """Take part in `hvdkit parity` as `part` says, in float64. Raises as `train` does."""
    recipe = recipe.model_copy(update={"precision": "fp64"})
    topology, dataset, network = _start(adapter, recipe)
    opener = partial(open_session, adapter, build, network)
    parity.take_part(adapter, opener, recipe, topology, dataset, part, lifeline)
    lifeline.beat("leaving Horovod")
    adapter.shutdown()


def _start(adapter: Adapter, recipe: Recipe) -> tuple[Topology, Dataset, resnet.ResNet]:
    _lengthen_cycle(recipe)
    topology = adapter.init(recipe.device, None if recipe.threads == "auto" else recipe.threads)
    adapter.seed(recipe.seed)
    check_can(adapter, recipe, topology)
    dataset = open_dataset(recipe.data, recipe.model.classes, recipe.seed)
    return topology, dataset, resnet.architecture(recipe.model.name, recipe.model.classes, dataset.shape[2])


def open_session(adapter: Adapter, build: Build, network: resnet.ResNet, recipe: Recipe) -> Session:
    """The recipe's network bound to its optimizer, with the initial weights that its seed draws.

    Raises RequestError as `Adapter.prepare` does, and where `build` makes other tensors than the table has.
    """
    precision = PRECISIONS[recipe.precision]
    network = replace(network, dtype=precision.parameters, compute_dtype=precision.compute, recompute=recipe.recompute)
    session = adapter.prepare(build(network), recipe.optimizer, recipe.loss, recipe.compression, recipe.precision)
    adapter.load_state(session, resnet.initial_state(network, recipe.seed))
    return session


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one rank of a recipe; start it with horovodrun for more ranks.")
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, help="an existing folder for metrics.jsonl and result.json")
    parser.add_argument("--parity", type=Path, metavar="FOLDER", help="do not train: take part in `hvdkit parity`")
    parser.add_argument("--steps", type=int, default=20, help="for --parity: steps to compare")
    parser.add_argument("--leads", action="store_true", help="for --parity: leave the trace that others follow")
    return parser.parse_intermixed_args(argv)


def _lengthen_cycle(recipe: Recipe) -> None:
    """On CPUs let Horovod's background thread wake each 5 ms instead of each 1 ms, unless the user has said otherwise.

    It takes its time from the network's cores, while gradients wait for it at most a cycle more.
    """
    if recipe.device != "gpu":
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")


def _result(
    adapter: Adapter,
    recipe: Recipe,
    topology: Topology,
    loop: Loop,
    network: resnet.ResNet,
    session: Session,
    initial_state_sha256: str,
    train_s: float,
) -> TrainResult:
    """Collective: all ranks call it, all get the same figures."""
    slowest = metrics.slowest_steps(adapter, loop.clock.seconds)
    warmup = min(recipe.warmup_steps, len(slowest) - 1)  # at least one step is measured, however short the run
    measured = slowest[warmup:]
    versions = adapter.versions()
    return TrainResult(
        framework=adapter.NAME,
        framework_version=versions["framework"],
        horovod_version=versions.get("horovod"),
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.name,
        model=recipe.model.name,
        parameters=resnet.parameter_count(network),
        np=topology.size,
        launcher=os.environ.get("HVDKIT_LAUNCHER") or ("horovodrun" if "HOROVOD_RANK" in os.environ else "none"),
        device=topology.device,
        threads=threads_per_rank(None if recipe.threads == "auto" else recipe.threads, topology.local_size),
        seed=recipe.seed,
        batch_size=recipe.batch_size,
        compression=recipe.compression,
        optimizer=recipe.optimizer.name,
        precision=recipe.precision,
        accumulate=recipe.accumulate,
        recompute=recipe.recompute,
        epochs=loop.epochs,
        steps=loop.step,
        warmup_steps=warmup,
        measured_steps=len(measured),
        images_per_second=loop.images(warmup, loop.step) / float(measured.sum()),
        step_ms_p50=1e3 * float(np.percentile(measured, 50)),
        step_ms_p90=1e3 * float(np.percentile(measured, 90)),
        train_loss=loop.train_loss,
        val_accuracy=loop.val_accuracy,
        val_loss=loop.val_loss,
        peak_rss_mib=max(adapter.allgather_object(metrics.peak_rss_mib(), name="peak_rss")),
        train_s=train_s,
        initial_state_sha256=initial_state_sha256,
        final_weights_sha256=digest(parameters_of(adapter.state(session))),
    )
