"""What importing costs, and which rooms may name a framework."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

HEAVY = ("torch", "tensorflow", "keras", "mxnet", "horovod", "matplotlib", "jinja2", "sklearn", "scipy")


@pytest.mark.parametrize("statement", ["import hvdkit", "import hvdkit.cli", "import hvdkit.launch, hvdkit.core.loop"])
def test_imports_load_nothing_heavy(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted(name.split('.')[0] for name in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert set(out.split()).isdisjoint(HEAVY)
    if statement == "import hvdkit.cli":
        assert set(out.split()).isdisjoint({"numpy", "pydantic", "yaml"}), (
            "these are loaded by the commands that need them"
        )


def test_training_starts_without_waiting_for_numpy() -> None:
    """What `hvdkit train` loads before its ranks are started holds up their start."""
    code = "import sys, hvdkit.cli; from hvdkit import catalogue, train; from hvdkit.launch import direct; import "
    code += "hvdkit.report.progress; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert set(out.split()).isdisjoint({"numpy", "safetensors", *HEAVY})


def test_frameworks_are_named_in_the_adapters_alone() -> None:
    rooms = [*(ROOT / "hvdkit" / "core").glob("*.py"), *(ROOT / "hvdkit" / "launch").glob("*.py")]
    rooms += [*(ROOT / "hvdkit" / "report").glob("*.py"), *(ROOT / "hvdkit").glob("*.py")]
    assert len(rooms) > 20
    for path in rooms:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in ("torch", "tensorflow", "keras", "mxnet"), path
                assert not name.startswith("horovod.") or path.name in ("rendezvous.py", "elastic_driver.py"), path


def test_no_import_circle() -> None:
    """Over imports at the top of a module; those inside functions and for type checking alone cannot close one."""
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "hvdkit").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        targets = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        graph[name] = {target for target in targets if target.startswith("hvdkit.")}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name in done or name not in graph:
            return
        for target in graph[name]:
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())
    assert len(done) > 30
