"""Write the pages of docs/reference/ that come from the program: commands, Python, recipes' keys, frameworks, patches.

Each is made of what declares it, so it cannot be out of date: `python -m scripts.schemas` writes them, and
tests/test_schemas.py compares.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import hvdkit
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.cli.generated import printable
from hvdkit.commands import COMMANDS, EXAMPLES, PANELS
from hvdkit.commands.request import Argument, Option, Request, function, plain
from hvdkit.core.precision import PRECISIONS
from hvdkit.recipe.schema import Location, Recipe
from hvdkit.runtimes import patches
from hvdkit.runtimes.pins import FRAMEWORKS, HOROVOD_VERSION, RUNTIMES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
_MADE = "This page is made by `python -m scripts.schemas`."
_WIDTH = 120
_TITLES = {
    "keras": "Keras", "mxnet": "MXNet", "pytorch": "PyTorch", "tensorflow": "TensorFlow",
}  # fmt: skip
# What no file of the package declares: whether its makers still release it.
_DEVELOPED = {"pytorch": "yes", "tensorflow": "yes", "keras": "yes", "mxnet": "no: 1.9.1 of 2022 is the last"}


def commands() -> str:
    """Every command with its arguments and options, as its Request declares them."""
    parts = [
        f"""# All commands and their options

{_MADE}

[commands.md](../commands.md) says what the commands have in common, and which page explains each. Options are those of
`hvdkit COMMAND --help`; [python.md](python.md) has the Python functions. *Repeat* means that an option may be given
several times.
"""
    ]
    for panel, words in PANELS.items():
        parts.append(f"## {panel}\n")
        for word in words.split():
            for name in sorted(name for name in COMMANDS if name.split()[0] == word):
                parts.append("\n".join(_command(name)))
    return "\n".join(parts)


def _command(name: str) -> Iterator[str]:
    module = import_module(f"hvdkit.commands.{name.replace(' ', '_').replace('-', '_')}")
    kind: type[Request] = get_type_hints(module.run)["request"]
    fields = {key: field for key, field in kind.declared().items() if field[1].typed}
    instead = import_module(f"hvdkit.commands.{module.INSTEAD}") if hasattr(module, "INSTEAD") else None
    if instead:
        fields = get_type_hints(instead.run)["request"].declared() | fields
    words = [_usage(key, *field) for key, field in fields.items() if isinstance(field[1], Argument)]
    yield f"### hvdkit {name}\n"
    yield f"{COMMANDS[name]}\n"
    yield f"```\n{' '.join(['hvdkit', name, *words])} [OPTIONS]\n"
    yield "\n".join(EXAMPLES[name]) + "\n```\n"
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for key, (info, option) in fields.items():
        names = option.names or (option.option(key),)
        shown = ", ".join(f"`{each}`" for each in sorted(names, key=lambda each: (not each.startswith("--"), each)))
        shown = f"`{_usage(key, info, option)}`" if isinstance(option, Argument) else shown
        yield row(shown, _default(info, option), option.help + ("; repeat" if _repeats(info, option) else ""))
    if hasattr(module, "preview"):
        yield row("`--dry-run`", "", "show what would be started, and start and write nothing")
    if printable(module):
        yield row("`--json`", "", "print the result as JSON: what the command's file has")
    yield ""


def _usage(key: str, info: FieldInfo, option: Option) -> str:
    word = option.metavar or key.upper()
    return word if info.is_required() or word.startswith("[") else f"[{word}]"


def _repeats(info: FieldInfo, option: Option) -> bool:
    several = get_origin(plain(info)) is list and not isinstance(option, Argument)
    return several and "repeated" not in option.help


def _default(info: FieldInfo, option: Option) -> str:
    if info.is_required():
        return "required"
    if option.shown or info.default in (None, False, True):
        return option.shown or ""
    return f"`{info.default}`"


def python() -> str:
    """Every function and class that `import hvdkit` gives, with signature and docstring."""
    parts = [
        f"""# All functions and classes

{_MADE}

What `import hvdkit` gives; [python.md](../python.md) shows its use, and what results have. Arguments have the meanings
of the [commands' options](commands.md). A recipe is a file, a name from `hvdkit recipes list`, or a dictionary;
`overrides` is a dictionary such as `{{"epochs": 2}}`, or a list of `"key=value"`. All raise `hvdkit.RequestError` for a
wrong request and `hvdkit.RunError` for a run that failed.

## Functions
"""
    ]
    for name in sorted(hvdkit._COMMANDS):  # type: ignore[attr-defined]
        called = function(name)
        returned = getattr(inspect.signature(called).return_annotation, "__name__", "")
        parts.append(f"### hvdkit.{name}\n\n{_code(called, f'hvdkit.{name}', f' -> {returned}')}{_said(called)}")
    parts.append("## Classes and functions for scripts of your own\n")
    for name in sorted(hvdkit._LAZY):  # type: ignore[attr-defined]
        given = getattr(hvdkit, name)
        is_error = inspect.isclass(given) and issubclass(given, Exception)
        code = "" if is_error else _code(given, f"hvdkit.{name}")
        parts.append(f"### hvdkit.{name}\n\n{code}{_said(given)}")
        for key, method in vars(given).items() if inspect.isclass(given) else ():
            if inspect.isfunction(method) and not key.startswith("_") and method.__doc__:
                parts.append(f"{_code(method, f'{name}.{key}')}{_said(method)}")
    return "\n".join(parts)


def _code(called: Any, name: str, end: str = "") -> str:
    """The call, as code."""
    words, star = [], False
    for parameter in inspect.signature(called).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        given = "…" if inspect.isfunction(parameter.default) else repr(parameter.default).replace("'", '"')
        default = "" if parameter.default is parameter.empty else f"={given}"
        if parameter.name != "self":
            words.append(f"{parameter.name}{default}")
    text = f"{name}({', '.join(words)}){end}"
    lines = textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "```python\n" + "\n".join(lines) + "\n```\n\n"


def _said(called: Any) -> str:
    return f"{inspect.getdoc(called) or ''}\n"


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', '&#124;').replace('<', '&lt;') for cell in cells)} |"


def recipe_keys() -> str:
    """Every key of a recipe, section by section."""
    parts = [
        f"""# All keys of a recipe

{_MADE}

[recipe.md](../recipe.md) shows a recipe and explains what needs more words. A section that has several kinds, such as
`optimizer`, has a table for each; the key that chooses it is in its heading.

An unknown key, a missing one and a value out of range are refused before anything starts, with a line for each.
"""
    ]
    parts += ["\n".join(_keys(place, kind)) for place, kind in sections(Recipe)]
    return "\n".join(parts)


def sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The file itself, with no name, then each kind of section in it once: the keys that lead to it, and its class."""
    waiting, seen = [("", model)], {model}
    for place, kind in waiting:
        yield place, kind
        for key, field in kind.model_fields.items():
            new = [each for each in classes(field.annotation) if each not in seen]
            waiting += [(f"{place}.{key}".lstrip("."), each) for each in new]
            seen.update(new)


def _keys(place: str, kind: type[BaseModel]) -> Iterator[str]:
    choice = next((f", {key}: {value}" for key, value in _chosen(kind)), "")
    yield f"## `{place}`{choice}\n" if place else "## The file\n"
    if place and kind.__doc__:
        yield f"{' '.join(textwrap.dedent(kind.__doc__).split())}\n"
    yield "| key | default | expected | meaning |"
    yield "|---|---|---|---|"
    for key, field in kind.model_fields.items():
        default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
        section = "a section, below" if any(classes(field.annotation)) else ""
        expected = "; ".join(filter(None, [_choices(field), _bounds(field), section]))
        yield row(f"`{key}`", default, expected, field.description or "")
    yield ""


def _chosen(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """The key by which a recipe chooses this kind of a section, and its values."""
    for key in ("name", "method"):
        field = kind.model_fields.get(key)
        if field is not None and get_origin(field.annotation) is Literal:
            yield (
                key,
                " or ".join(f"{value}" for value in get_args(field.annotation)[:4])
                + (" …" if len(get_args(field.annotation)) > 4 else ""),
            )


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes of the sections that a key may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from classes(part)


def _literals(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _literals(part)


def _choices(field: FieldInfo) -> str:
    found = [f"`{value}`" for value in _literals(field.annotation)]
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Location: "a path"}
    kinds = {field.annotation, *get_args(field.annotation)}
    found += [name for kind, name in names.items() if kind in kinds]
    return ", ".join([*found, *(["null"] if type(None) in kinds else [])])


def _bounds(field: FieldInfo) -> str:
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    limits = [(words[name], getattr(one, name)) for one in field.metadata for name in words if hasattr(one, name)]
    return ", ".join(f"{word} {limit:,}" for word, limit in limits if limit is not None and abs(limit) < 2**24)


def _value(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "the section's defaults"
    named = {None: "null", True: "true", False: "false"}
    return f"`{named.get(value, value) if isinstance(value, bool | None) else value}`"


def frameworks() -> str:
    """What each framework can do here, by its adapter's capabilities and its runtime's pins."""
    images = re.findall(r"^FROM node AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    rows = {
        "pinned version": lambda name: RUNTIMES[FRAMEWORKS[name]].version(False) if name != "keras" else _keras(),
        "still developed": _DEVELOPED.__getitem__,
        "Python": lambda name: _pythons(FRAMEWORKS[name]),
        "CUDA of the GPU build": lambda name: f"{RUNTIMES[FRAMEWORKS[name]].cuda}, not run on a GPU",
        "image (`docker build --target`)": lambda name: f"`{next(i for i in images if i == FRAMEWORKS[name])}`",
        "precision on a CPU": lambda name: _precisions(name, ""),
        "precision on a GPU": lambda name: _precisions(name, "gpu-"),
        "`sharding`": lambda name: _listed(
            "optimizer", *(stage for stage in ("gradients", "parameters") if _can(name, f"shard-{stage}"))
        ),
        "`parallel` of a GPT": lambda name: _listed(*(axis for axis in ("pipeline", "tensor") if _can(name, axis))),
        "`parallel` of a ResNet": lambda name: _listed(
            *(axis for axis in ("pipeline", "tensor") if _can(name, f"{axis}-resnet"))
        ),
        "`parallel` of your own model": lambda name: _listed(
            *(axis for axis in ("pipeline", "tensor") if _can(name, f"{axis}-own"))
        ),
        "`parallel.schedule: interleaved`": lambda name: _yes(name, "interleaved"),
        "`recompute`": lambda name: _yes(name, "recompute"),
        "`order: priority` (CPU)": lambda name: _yes(name, "order"),
        "`elastic`": lambda name: "yes",
        "a profile of its own beside hvdkit's": lambda name: _yes(name, "own-profile"),
    }
    table = [
        row("", *(_TITLES[name] for name in FRAMEWORKS)),
        "|---" * (len(FRAMEWORKS) + 1) + "|",
        *(row(what, *(cell(name) for name in FRAMEWORKS)) for what, cell in rows.items()),
    ]
    text = """Divided models and `order: priority` are for CPUs. What a column does not have is refused before training,
with a line that says what is expected. Nothing has run on a GPU yet ([what was checked](../horovod.md#gpu-builds)). The
three builds for GPUs are for three versions of CUDA, so they are three environments or images, not one. Which framework
is fastest depends on model and machine: [choosing.md](../choosing.md)."""
    return f"# What each framework can do\n\n{_MADE}\n\n" + "\n".join(table) + f"\n\n{text}\n"


def _keras() -> str:
    packages = RUNTIMES["tensorflow"].shared_packages
    version = next(each.partition("==")[2] for each in packages if each.startswith("keras=="))
    return f"{version} on TensorFlow"


def _pythons(runtime: str) -> str:
    versions = [f"{major}.{minor}" for major, minor in RUNTIMES[runtime].pythons]
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def _can(name: str, capability: str) -> bool:
    return capability in CAPABILITIES[name]


def _yes(name: str, capability: str) -> str:
    return "yes" if _can(name, capability) else "no"


def _listed(*words: str) -> str:
    return ", ".join(words) or "none"


def _precisions(name: str, prefix: str) -> str:
    needed = {each: each if each == "fp64" else f"{prefix}{each}" for each in PRECISIONS}
    return _listed(*(each for each in PRECISIONS if each == "fp32" or _can(name, needed[each])))


def patch_heads() -> str:
    """The head of each patch."""
    parts = [
        f"""# The patches of Horovod

{_MADE}

hvdkit applies these patches to Horovod {HOROVOD_VERSION} in the order of their names. Each section is the
patch's own head: the symptom, the cause, the builds that it is for, where Horovod's users discuss it, and the test that
fails without it. [horovod.md](../horovod.md#the-patches) says how to apply them by hand, and what changes for
users of Horovod's own interfaces.
"""
    ]
    for patch in patches.every():
        facts = {
            "Symptom": patch.symptom,
            "Cause": patch.cause,
            "For": ", ".join(map(str, patch.frameworks)) or "every build",
            "Upstream": patch.upstream,
            "Test": patch.test,
        }
        lines = [f"- **{name}:** {text}" for name, text in facts.items()]
        wrapped = [
            "\n".join(
                textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
            )
            for line in lines
        ]
        parts.append(f"## {patch.name}\n\n" + "\n".join(wrapped) + "\n")
    return "\n".join(parts)


PAGES: dict[Path, Callable[[], str]] = {
    FOLDER / "commands.md": commands,
    FOLDER / "python.md": python,
    FOLDER / "recipe-keys.md": recipe_keys,
    FOLDER / "frameworks.md": frameworks,
    FOLDER / "patches.md": patch_heads,
}
