"""What importing costs, and which rooms may name a framework."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hvdkit
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT, rest_thorough, run

STEP = """
import sys
import numpy as np, torch
from hvdkit.adapters import pytorch
from hvdkit.core.group import world_of
from hvdkit.core.session import Session
from hvdkit.recipe.schema import AdamW, Lars, Loss, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.data.batches import Batch

world = world_of(pytorch.init("cpu"))
kind, rate = sys.argv[1], {"learning_rate": 0.1}
settings = Sgd(**rate) if kind == "sgd" else AdamW(name=kind, **rate) if kind == "adamw" else Lars(name=kind, **rate)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
session = Session(pytorch, model, settings, Loss(), Dense(pytorch, world))
session.broadcast_state(world)
before = model[1].weight.detach().clone()
session.train_step([Batch(np.arange(24, dtype=np.float32).reshape(2, 2, 2, 3), np.array([0, 1]))])
print(float((model[1].weight - before).abs().max()), "torch._dynamo" in sys.modules)
"""
HEAVY = ("torch", "tensorflow", "keras", "mxnet", "horovod", "matplotlib", "jinja2", "sklearn", "scipy")


@pytest.mark.parametrize(
    "statement", ["import hvdkit", "import hvdkit.cli.app", "import hvdkit.launch, hvdkit.handlers.standard"]
)
def test_imports_load_nothing_heavy(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted(name.split('.')[0] for name in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=hygiene.patience(60)
    ).stdout
    assert set(out.split()).isdisjoint(HEAVY)
    if statement == "import hvdkit.cli.app":
        assert set(out.split()).isdisjoint({"numpy", "pydantic", "yaml"}), (
            "these are loaded by the commands that need them"
        )


def test_training_starts_without_waiting_for_numpy() -> None:
    """What `hvdkit train` loads before its ranks are started holds up their start."""
    code = "import sys, hvdkit.cli.app, hvdkit.recipe.registry, hvdkit.commands.train, hvdkit.launch.launchers.direct, "
    code += "hvdkit.report.progress; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=hygiene.patience(60)
    ).stdout
    assert set(out.split()).isdisjoint({"numpy", "safetensors", *HEAVY})


def test_the_collector_waits_until_all_is_loaded_and_no_longer() -> None:
    code = "import gc, sys, hvdkit.worker.startup as boot; acts = [sys.excepthook is not sys.__excepthook__]; "
    code += "acts.append(not gc.isenabled()); boot.begin(); loading = gc.isenabled(); import numpy; boot.done(); "
    code += "print(*acts, loading, gc.isenabled(), gc.get_freeze_count() > 1000); "
    code += "gc.disable(); boot.done(); print(gc.isenabled())"
    environment = {name: value for name, value in os.environ.items() if name != "HVDKIT_RANK_DIR"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True,
        timeout=hygiene.patience(60),
    ).stdout  # fmt: skip
    assert out.split()[:2] == ["False", "False"], "nothing acts at its import"
    assert out.split()[2:] == ["False", "True", "True", "False"], "and a user's own choice stays"


TRAINS = """
import os, runpy, sys

def leave(status):
    print(status, *(name for name in sys.modules if name.startswith("hvdkit")), file=sys.stderr, flush=True)
    leaving(status)

leaving, os._exit = os._exit, leave
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_plain_training_loads_nothing_of_the_other_modes(tmp_path: Path) -> None:
    runtime, recipe = find("pytorch"), ROOT / "recipes" / "resnet20-digits.yaml"
    words = [str(ROOT / "recipes" / "pytorch" / "resnet.py"), str(recipe), "model.name=resnet8", "steps=1"]
    environment = os.environ | runtime.environment | {"OMP_NUM_THREADS": "1"}
    command = [str(runtime.python), "-c", TRAINS, *words]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=hygiene.patience(120)
    )
    status, *modules = done.stderr.splitlines()[-1].split()
    assert status == "0", done.stderr
    rooms = {name.split(".")[1] for name in modules if "." in name}
    assert rooms.isdisjoint({"cli", "commands", "report", "simulator", "profiling", "launch", "baselines", "runtimes"})
    others = {f"hvdkit.worker.{mode}" for mode in ("parity", "profile", "inference", "bench", "proof", "own_task")}
    others |= {
        "hvdkit.strategies.codecs",
        "hvdkit.checkpoint.elastic",
        "hvdkit.data.imagefolder",
        "hvdkit.handlers.tensorboard",
    }
    assert others.isdisjoint(modules)
    paths = [ROOT.joinpath(*name.split(".")) for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert len(modules) <= 62 and lines <= 9_690, (len(modules), lines)


@pytest.mark.parametrize("optimizer", rest_thorough("lars", "sgd", "adamw"))
def test_pytorch_trains_without_its_compiler(tmp_path: Path, optimizer: str) -> None:
    """Importing torch._dynamo takes a second of each start, and nobody compiles here."""
    script = tmp_path / "step.py"
    script.write_text(STEP)
    runtime = find("pytorch")
    environment = os.environ | runtime.environment | {"OMP_NUM_THREADS": "1"}
    command = [str(runtime.python), str(script), optimizer]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=hygiene.patience(120))
    assert done.returncode == 0, done.stderr
    moved, compiler = done.stdout.split()
    assert float(moved) > 0 and compiler == "False"


ROOMS = [  # from the top down: a room uses those below it
    *(
        "cli",
        "commands",
        "tracking",
        "report",
        "simulator",
        "profiling",
        "launch",
        "worker",
        "handlers",
        "baselines",
    ),
    *("adapters", "checkpoint", "strategies", "core", "tasks", "data", "recipe", "results", "runtimes"),
]
GROUND = {
    f"hvdkit{part}"
    for part in ("", ".defaults", ".errors", ".files", ".handshake", ".heartbeat", ".paths", ".programs")
}
GROUND |= {
    "hvdkit.elastic_line",
    "hvdkit.folder_lock",
    "hvdkit.rendezvous",
    "hvdkit.progress",
    "hvdkit.replaced",
    "hvdkit.usage",
}


def imports() -> dict[str, set[str]]:
    """Every module of hvdkit, and what it imports anywhere: at its top, inside functions, and for types."""
    paths = {}
    for path in (ROOT / "hvdkit").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {each if each in paths else node.module for each in inner}
    assert len(found) > 100
    return found


def test_frameworks_are_named_in_the_adapters_and_baselines_alone() -> None:
    for module, targets in imports().items():
        if module.startswith(("hvdkit.adapters.", "hvdkit.baselines.")):
            continue
        for name in targets:
            assert name.split(".")[0] not in ("torch", "tensorflow", "keras", "mxnet"), module
            starts_ranks = module.startswith("hvdkit.launch.launchers.")
            assert not name.startswith("horovod") or starts_ranks, module


def test_no_import_circle() -> None:
    found = imports()
    graph = {name: targets & found.keys() for name, targets in found.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name in done:
            return
        for target in graph[name] - {name}:
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())
    assert done == graph.keys()


def test_a_class_has_a_name_of_its_own() -> None:
    """What frameworks do each in their way has one name in all of them, and may have it in the base that they share."""
    places: dict[str, dict[str, list[str]]] = {}
    for path in (ROOT / "hvdkit").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        framework = next((word for word in FRAMEWORKS if word in re.split(r"[/.]", name)), "")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, {}).setdefault(framework, []).append(name)
    assert len(places) > 500
    assert {name: where for name, where in places.items() if any(len(files) > 1 for files in where.values())} == {}


def test_a_module_has_a_name_of_its_own_in_its_room() -> None:
    """Adapters are folders of the same names, each beside what they share."""
    paths = [path.relative_to(ROOT / "hvdkit") for path in (ROOT / "hvdkit").rglob("*.py") if path.stem != "__init__"]
    names = Counter((path.parts[0], path.name) for path in paths)
    assert [key for key, count in names.items() if count > 1 and key[0] != "adapters"] == []


def test_rooms_use_those_below_them() -> None:
    wrong = []
    for module, targets in imports().items():
        if module in GROUND | {"hvdkit.__main__"}:
            continue
        floor = ROOMS.index(module.split(".")[1])
        for target in targets:
            if target.startswith("hvdkit.") and target not in GROUND and ROOMS.index(target.split(".")[1]) < floor:
                wrong.append(f"{module} -> {target}")
    assert not wrong


def test_the_version_needs_no_command() -> None:
    done = run([sys.executable, "-m", "hvdkit", "--version"], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hvdkit {hvdkit.__version__}\n", "")


def test_help_tells_what_is_taken_where_nothing_is_given() -> None:
    done = run([sys.executable, "-m", "hvdkit", "compare", "--help"], timeout=60)
    assert "[default: (all four)]" in done.stdout, "square brackets in a help text are markup, and vanish"
