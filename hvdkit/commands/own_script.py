"""What is known of a script of the user's own (`model.script`) before it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import OwnModel, Recipe
from hvdkit.runtimes.pins import FRAMEWORKS

# Frameworks by the modules of Horovod and their own, the first of those that share a runtime counting.
_FRAMEWORK_OF = {
    "torch": "pytorch",
    "tensorflow.keras": "keras",
    "keras": "keras",
    "tensorflow": "tensorflow",
    "mxnet": "mxnet",
}
_ADAPTERS = "hvdkit.adapters"


def located(recipe: Recipe, folder: Path | None, overrides: Iterable[str]) -> Recipe:
    """The recipe with the absolute path of its script, if there is one and it is found.

    It is looked for beside the recipe, in `folder`, then in the current folder; if `overrides` name it, the other way
    round.
    """
    if not isinstance(recipe.model, OwnModel):
        return recipe
    folders = [folder or Path(), Path()]
    if any(text.partition("=")[0].strip() in ("model", "model.script") for text in overrides):
        folders.reverse()
    script = next((path for base in folders if (path := base / recipe.model.script).is_file()), None)
    if script is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"script": str(script.resolve())})})


def modules_of(script: Path) -> list[str]:
    """The files and folders beside a script that it, or one of them, imports; empty for a script that is not here."""
    return list(_imports(script)[0])


def frameworks_of(script: Path, root: Path | None = None) -> list[str]:
    """The frameworks whose Horovod a program imports, itself or by a file beside it; without one, those it imports.

    Modules that it imports are looked for in `root`, by default its folder. One of several that have the same runtime
    counts, Keras before TensorFlow. Raises RequestError for a script that is no Python.
    """
    with suppress(OSError):
        try:
            ast.parse(script.read_bytes())
        except (SyntaxError, ValueError) as error:
            where = f"{script}, line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(script)
            raise RequestError(f"{where}: no Python: {getattr(error, 'msg', error)}; correct it") from None
    imported = [f"{name}." for name in _imports(script, root)[1]]
    for prefix in ("horovod.", ""):
        known = [framework for start, framework in reversed(_FRAMEWORK_OF.items())
                 if any(name.startswith(f"{prefix}{start}.") for name in imported)]  # fmt: skip
        if known:
            return sorted({FRAMEWORKS[framework]: framework for framework in known}.values())
    return []


def framework_under(script: Path | None, name: str, given: str | None, options: str, root: Path | None = None) -> str:
    """The framework that is `given` for the program `name`, or else that of its imports; `script` is None if not here.

    Raises RequestError where they are for another one, and where none is given and they are for none, or several: one
    of the `options` says it.
    """
    theirs = frameworks_of(script, root) if script else []
    if given:
        if theirs and FRAMEWORKS.get(given, given) not in (FRAMEWORKS[framework] for framework in theirs):
            raise RequestError(f"{name}: it imports {' and '.join(theirs)}, got --framework {given}; leave that out")
        return given
    if len(theirs) == 1:
        return theirs[0]
    what = f"it imports Horovod for {' and '.join(theirs)}" if theirs else "no import of Horovod is seen in it"
    raise RequestError(f"{name}: {what if script else 'it is not in this folder'}; give {options}")


def train_apart(script: Path, np: int) -> list[str]:
    """A line for a program of several ranks that imports a framework, and in which no import of Horovod is seen."""
    if np == 1 or not frameworks_of(script) or any(f"{name}.".startswith("horovod.") for name in _imports(script)[1]):
        return []
    what = "no import of Horovod is seen in it, so each rank trains for itself unless an installed module calls Horovod"
    return [f"{script.name}: {what}; docs/own-scripts.md has the lines to change for DistributedDataParallel and Keras"]


def module_file(name: str) -> Path | None:
    """The file of a module that `python -m` would run, if it is below the current folder."""
    path = Path(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)


def _imports(script: Path, root: Path | None = None) -> tuple[dict[str, None], set[str]]:
    """The files and folders in `root`, the script's folder, that it, or one of them, imports; names of all modules.

    What `run_task` is given as its framework counts as an import of that adapter.
    """
    modules: dict[str, None] = {}
    every: set[str] = set()
    waiting, seen = [script], set[Path]()
    while waiting:
        file = waiting.pop().resolve()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level:
                for package in list(file.parents)[node.level - 1 : node.level]:
                    base = package.joinpath(*(node.module or "").split("."))
                    inside = ("__init__", *(alias.name for alias in node.names))
                    waiting += [base.with_name(f"{base.name}.py"), *(base / f"{name}.py" for name in inside)]
            elif isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
                every |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("run_task", "hvdkit.run_task"):
                every |= {f"{_ADAPTERS}.{word.value!s}" for word in node.args[:1] if isinstance(word, ast.Constant)}
            every |= set(names)
            for name in {full.partition(".")[0] for full in names} - {""}:
                beside, folder = (root or script.parent) / f"{name}.py", (root or script.parent) / name
                if not beside.is_file() and any(folder.glob("*.py")):
                    beside = folder
                if beside.exists() and beside != script and beside.name not in modules:
                    modules[beside.name] = None
                    waiting += folder.rglob("*.py") if beside is folder else [beside]
    return modules, every


def framework_of(recipe: Recipe) -> str | None:
    """The framework of the recipe's script: the one whose name it gives `run_task`, or whose adapter it imports.

    None without a script, or with none or several.
    """
    names = _imports(Path(recipe.model.script))[1] if isinstance(recipe.model, OwnModel) else ()
    known = [name for name in FRAMEWORKS if any(f"{found}.".startswith(f"{_ADAPTERS}.{name}.") for found in names)]
    return known[0] if len(known) == 1 else None


def framework_for(recipe: Recipe, given: str | None) -> str:
    """The framework that is `given`, or else that of the recipe's script, or the default.

    Raises RequestError where the script is for another one.
    """
    theirs = framework_of(recipe)
    if isinstance(recipe.model, OwnModel) and given and theirs and theirs != given:
        raise RequestError(
            f"model.script: {recipe.model.script}: it trains with {theirs}, got --framework {given}; "
            f"give --framework {theirs}, or a script for {given}"
        )
    return given or theirs or FRAMEWORK
