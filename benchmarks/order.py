"""Where `order: priority` pays: steps over slow links, measured beside predicted.

    .venv/bin/python -m benchmarks.order --model resnet50 --mbit-per-s 100
    .venv/bin/python -m benchmarks.order --model resnet50 --mbit-per-s 300 --how priority --spans
    .venv/bin/python -m benchmarks.order --draw

Four hosts with slow links (`hvdkit hosts`), a rank on each, whose device sleeps for the time that each layer
takes (`order_task.py`): so what is compared is when gradients are sent, and forwards begin. Measured are gradients
after backward (`none`), during it (`overlap`) and in order (`priority`). The links are measured too, by `hvdkit bench`,
and from them the simulator predicts each step. Links, gradients and pieces are a tenth (SCALE) of what they are called,
as this machine cannot carry four times 1 Gbit/s in packets of 1,500 bytes; a step takes as long. Results are added to
order.json; `--draw` makes docs/images/priority.png of a step that was measured with `--spans`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import HERE, ROOT, say
from benchmarks.written import facts, text_of
from hvdkit.core.pieces import PIECE_BYTES
from hvdkit.files import write_atomic
from hvdkit.launch.namespaces import Network
from hvdkit.profiling import timeline
from hvdkit.report import gantt, plotting
from hvdkit.simulator import cluster, engine, step
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.workload import Gradient, Workload
from hvdkit.tasks import gpt, resnet

RANKS, BATCH, SCALE = 4, 16, 10
POLICIES = {"none": "grouped", "overlap": "horovod", "priority": "priority"}
MODELS = {  # the table, and the seconds that a device takes for forward and backward, of which a third is forward
    "resnet50": (resnet.architecture("resnet50", 1000), 4.0),
    "gpt": (gpt.GPT("gpt", layers=4, heads=6, width=384, context=256, vocabulary=4096), 1.5),
}
RESULTS, PICTURE = HERE / "order.json", ROOT / "docs" / "images" / "priority.png"


def main() -> None:
    """Measure, and add to the results; or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[100.0])
    parser.add_argument("--how", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--steps", type=int, default=7, help="of a run; the first two are left out")
    parser.add_argument("--piece-mib", type=float, default=PIECE_BYTES / 2**20)
    parser.add_argument("--credit-mib", type=float, default=PIECE_BYTES / 2**20)
    parser.add_argument("--spans", action="store_true", help="keep when layers computed, and pieces were sent")
    parser.add_argument("--draw", action="store_true", help="draw the step that was measured with --spans")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-order"))
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.draw:
        _draw()
        return
    for rate in asked.mbit_per_s:
        with Network(RANKS, rate / SCALE) as network:
            links = _links(network, asked.out / f"links-{rate:g}")
            for how in asked.how:
                _measure(asked, network, rate, links, how)


def workload(model: str) -> Workload:
    """A step of one rank of a model: its compute is divided among layers by their multiply-adds."""
    table, seconds = MODELS[model]
    shapes = table.parameter_shapes()
    work = table.work_by_layer(table.usual_side) if isinstance(table, resnet.ResNet) else table.work_by_layer()
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in shapes))
    share = {layer: seconds * work.get(layer, 0) / sum(work.values()) for layer in layers}
    tensors, last = [], ""
    for name, shape in reversed(shapes.items()):
        layer = name.rpartition(".")[0]
        segment = 2 / 3 * share[layer] if layer != last else 0.0
        size = -(-math.prod(shape) // SCALE)
        tensors.append(Gradient(name, layer, (size,), 4 * size, segment))
        last = layer
    return Workload(model, BATCH, tuple((layer, share[layer] / 3) for layer in layers), tuple(tensors))


def _links(network: Network, folder: Path) -> cluster.Cluster:
    """The links as `hvdkit bench` measures them, once for each rate."""
    if not (folder / "cluster.yaml").exists():
        words = ["bench", "allreduce", "--framework", "pytorch", "-np", str(RANKS), "-H", network.hosts_option()]
        words += ["--max-bytes", str(2**21), "--seconds", "1", "--link-mbit-per-s", f"{network.mbit_per_s:g}"]
        harness.hvdkit([*words, "--out", folder, "--overwrite"], start=network.run)
    return cluster.load(folder / "cluster.yaml")


def _case(model: str, links: cluster.Cluster, how: str, piece_mib: float) -> step.Case:
    return step.Case(workload(model), ClusterLinks(links, RANKS), POLICIES[how], piece_bytes=piece_mib * 2**20 / SCALE)


def _measure(asked: argparse.Namespace, network: Network, rate: float, links: cluster.Cluster, how: str) -> None:
    """Measure a way at a rate, and keep it beside its prediction."""
    out, work = asked.out, workload(asked.model)
    layers = []
    for name, forward_s in work.forward:
        mine = [tensor for tensor in work.tensors if tensor.layer == name]
        layers.append([forward_s, sum(each.segment_s for each in mine), [list(each.shape) for each in reversed(mine)]])
    (out / "layers.json").write_text(json.dumps(layers))
    options = {"layers": str(out / "layers.json"), "overlap": how == "overlap", "piece_mib": asked.piece_mib / SCALE}
    environment = {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "900"}  # the initial weights cross the links
    if how == "priority":
        environment["HOROVOD_CREDIT_BYTES"] = f"{asked.credit_mib * 2**20 / SCALE:.0f}"
    if asked.spans:
        options["spans"] = str(out / "spans.json")
        environment["HOROVOD_TIMELINE"] = str(out / "timeline.json")
    recipe = {
        "name": "order",
        "model": {
            "name": "own",
            "script": str(Path(__file__).with_name("order_task.py")),
            "options": options,
        },
        "data": {"name": "own"},
        "batch_size": BATCH,
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
        "steps": asked.steps,
        "warmup_steps": 1,
        "threads": 1,
        "order": "priority" if how == "priority" else "none",
    }
    (out / f"{how}.yaml").write_text(json.dumps(recipe))
    where = ["-H", network.hosts_option(), "--stall-timeout", "900"]
    file = str(out / f"{how}.yaml")
    found = harness.train(
        "pytorch", RANKS, file, [], out / how, where, timeout_s=3600, start=network.run, env=environment
    )
    case = _case(asked.model, links, how, asked.piece_mib)
    row = {
        "model": asked.model, "framework": "pytorch", "mbit_per_s": rate, "order": how,
        "piece_mib": asked.piece_mib, "credit_mib": asked.credit_mib,
        "seconds": [ms / 1e3 for ms in found["step_ms"][1:]],
        "predicted_s": step.period(case), "noisy": found["noisy"],
    }  # fmt: skip
    say(f"{asked.model} {rate:g} Mbit/s {how}: {sorted(row['seconds'])} s, predicted {row['predicted_s']:.2f}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "links": {}, "step": None}
    keys = ("model", "mbit_per_s", "order", "piece_mib", "credit_mib")
    if not asked.spans:
        kept["rows"] = [each for each in kept["rows"] if any(each[key] != row[key] for key in keys)] + [row]
    else:
        spans = _spans(out, asked.steps)
        kept["step"] = {**row, "spans": spans}
    kept["links"][f"{rate:g}"] = links.model_dump(mode="json")
    write_atomic(RESULTS, text_of(facts("python -m benchmarks.order") | kept) + "\n")


def _spans(out: Path, steps: int) -> list[tuple[str, str, float, float]]:
    """(kind, name, begin, end) on rank 0 of the last step but one, in seconds from the end of backward before it."""
    found = json.loads((out / "spans.json").read_text())
    text = (out / "timeline.json").read_text().rstrip().rstrip(",")
    (out / "timeline.json").write_text(text if text.endswith("]") else text + "]")
    sent = timeline.read(out / "timeline.json", found["ahead"])
    spans = [("communication", op.names[0], op.start, op.end) for op in sent if "priority" in op.names[0]]
    spans += [tuple(each) for each in found["layers"]]
    ends = [end for kind, name, _, end in found["layers"] if (kind, name) == ("backward", "0")]
    begin, end = ends[-3], ends[-2]
    return [
        (kind, name, round((first - begin) / 1e9, 4), round((last - begin) / 1e9, 4))
        for kind, name, first, last in spans
        if last > begin and first < end
    ]


def _draw() -> None:
    """Predicted above, measured below, in the same scale."""
    kept = json.loads(RESULTS.read_text())
    found = kept["step"]
    links = cluster.Cluster.model_validate(kept["links"][f"{found['mbit_per_s']:g}"])
    schedule = engine.run(step.detailed(_case(found["model"], links, found["order"], found["piece_mib"])), 8)
    _, begin, end, spans = gantt.window(schedule)
    foreseen = [(each.task.kind, max(0.0, each.start - begin), min(end, each.end) - begin) for each in spans]
    measured = [(kind, max(0.0, first), last) for kind, _, first, last in found["spans"]]
    length = max(last for kind, _, last in measured if kind == "backward")
    colours = {"forward": "#4c8bbf", "backward": "#2f5d8a", "communication": "#c8553d"}
    with plotting.picture(PICTURE, 13, 4.2) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.13, right=0.99, bottom=0.2, top=0.92)
        names = []
        for title, rows in (("predicted", foreseen), ("measured", measured)):
            for row, kinds in (("device", ("forward", "backward")), ("network", ("communication",))):
                for kind in kinds:
                    bars = [(first, min(last, length) - first) for each, first, last in rows if each == kind]
                    where, label = (len(names) - 0.31, 0.62), f"{'_' if title == 'measured' else ''}{kind}"
                    axes.broken_barh(bars, where, color=colours[kind], lw=0.4, edgecolor="white", label=label)
                names.append(f"{row}, {title}")
        title = f"{found['model']}, {RANKS} hosts, {found['mbit_per_s']:g} Mbit/s, order: {found['order']}"
        axes.set(xlim=(0, length), ylim=(len(names) - 0.5, -0.5), xlabel="seconds since backward ended", title=title)
        axes.set_yticks(range(len(names)), names)
        figure.legend(loc="lower center", ncols=3, frameon=False)


if __name__ == "__main__":
    main()
