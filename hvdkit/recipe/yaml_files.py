"""Reads users' YAML files strictly, with a size limit and short error messages that name the place of a fault.

Plain words are read by the core schema of YAML 1.2 (yaml.org/spec/1.2.2, section 10.3.2): `010` is ten, and `1:30`,
`yes`, `1_000` and `2024-01-01` are texts. Where a document's class expects a text, the word stays as it is written.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from hvdkit.errors import RequestError
from hvdkit.files import read_bounded

SCHEMA_LINE = "# yaml-language-server: $schema="
# Hundreds of times the size of a recipe or cluster file; parsing a file of this size takes seconds.
MOST_BYTES = 2**20
# Far above any number in a recipe or cluster file; Python cannot convert much larger ones to float.
_MOST_BITS = 1000
_TAG = "tag:yaml.org,2002:"
_CORE = {  # the tags of plain words by pattern, and the characters with which these begin; others are texts
    "null": (r"(?:~|null|Null|NULL|)", [*"~nN", ""]),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    "int": (r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
}


def load(path: Path, expected: str, missing: str | None = None, root: Any = None) -> Any:
    """The content of a YAML file. Raises RequestError, one line with the file and what was `expected`.

    `missing` replaces `expected` in the message about a file that does not exist. `root` is the pydantic class of the
    document, which says where texts are.
    """
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise RequestError(f"{named(path)}: no such file; expected {missing or expected}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{named(path)}: no text (byte {error.start} is not UTF-8); expected {expected}") from None
    except OSError as error:
        raise RequestError(f"{named(path)}: cannot be read ({error.strerror}); expected {expected}") from None
    return parse(text, named(path), root)


def parse(text: str, where: str, root: Any = None, key: str = "") -> Any:
    """The content of a YAML text. Raises RequestError, one line that begins with `where`, if it is damaged.

    The text is the value of the dotted `key` of a document of the class `root`, or the whole document.
    """
    try:
        return copy.deepcopy(_parsed(text, root, key))  # callers modify the result
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RequestError(f"{where}{position}: damaged YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"{where}: damaged YAML: {reason}") from None


@functools.lru_cache(maxsize=64)
def _parsed(text: str, root: Any, key: str) -> Any:
    """The content of a YAML text, cached: a report reads the same recipe for each of its runs."""
    return yaml.load(text, Loader=functools.partial(_Loader, root=root, key=key))  # type: ignore[arg-type]


@functools.cache
def text_keys(root: Any) -> frozenset[str]:
    """The dotted keys of a pydantic class that can hold a text other than one of a few words; none without a class."""
    keys: set[str] = set()

    def add(kind: Any, key: str) -> None:
        if kind is str:
            keys.add(key)
        for name, field in getattr(kind, "model_fields", {}).items():
            add(field.annotation, f"{key}.{name}" if key else name)
        for inner in () if get_origin(kind) is dict else get_args(kind):  # what is in a dictionary is the user's
            add(inner, key)

    add(root, "")
    return frozenset(keys)


def dump(value: Any, **options: Any) -> str:
    """The value as YAML, which readers of YAML 1.1 and 1.2 read alike; `options` are those of `yaml.dump`."""
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, **options))


def override(document: dict[str, Any], text: str, root: Any = None) -> str | None:
    """Apply one `key=value` to the document of the class `root`; returns an error line, or None.

    A text is taken as it is typed, unless it is null or begins with a quote or bracket, as YAML does.
    """
    key, _, value = text.partition("=")
    if not key.strip() or not value.strip():
        return f"override {brief(text)}: expected key=value, such as epochs=2 or optimizer.momentum=0.8; null for none"
    *parents, leaf = key.strip().split(".")
    section = document
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            return f"override {brief(text)}: {brief(parent)} holds {brief(inner)}, so nothing can be set below it"
        section = inner
    word = value.strip()
    if key.strip() in text_keys(root) and not (word[:1] in {*"'\"[{"} or re.fullmatch(_CORE["null"][0], word)):
        section[leaf] = word
        return None
    try:
        section[leaf] = parse(value, f"override {brief(text)}", root, key.strip())
    except RequestError as error:
        return str(error)
    return None


def schema_line(schema: Path | str) -> str:
    """The first line of a YAML file, by which editors find its JSON Schema: a path's URL, or a relative name."""
    return f"{SCHEMA_LINE}{schema if isinstance(schema, str) else schema.as_uri()}\n"


def named(path: Path | str) -> str:
    """A path or another name, as shown in a one-line message."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def brief(value: Any) -> str:
    """A value as shown in a message, at most 60 characters long."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, without duplicate keys. `root` and `key` are those of `parse`."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - as in PyYAML's own classes; those of YAML 1.1 are left out
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("map", "seq", "str", "null")
    }

    def __init__(self, stream: str, root: Any, key: str) -> None:
        super().__init__(stream)
        self._texts, self._key = text_keys(root), key

    def get_single_node(self) -> Node | None:
        node: Node | None = super().get_single_node()
        return node if node is None else _with_texts(node, self._key, self._texts)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except (AttributeError, LookupError, TypeError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"no {kind}: {brief(node.value)}", node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ConstructorError(None, None, "a number of more than 300 digits", node.start_mark)
        return value

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key, fault = self.construct_object(key_node, deep=True), None
            if not isinstance(key, str):
                fault = f"expected text as key, got {brief(key)}"
            elif key == "<<" and key_node.style is None:
                fault = "YAML 1.2 merges no mappings by <<; write the keys out"
            elif key in seen:
                fault = f"key {brief(key)} is there twice"
            if fault:
                raise ConstructorError(None, None, fault, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: MappingNode) -> None:
        """Nothing: this is YAML 1.1's merge by `<<`."""


class Dumper(yaml.SafeDumper):
    """Quotes each text that YAML 1.1 or 1.2 would read as something else."""


def _scalar(loader: _Loader, node: ScalarNode) -> int | float | bool:
    kind, word = node.tag.removeprefix(_TAG), str(loader.construct_scalar(node))
    if not re.fullmatch(_CORE[kind][0], word):
        raise ValueError  # a value may not fit its tag (`!!bool maybe`)
    if kind == "int":
        return int(word, {"0o": 8, "0x": 16}.get(word[:2], 10))
    return word.lower() == "true" if kind == "bool" else float(re.sub(r"\.(?=inf|nan)", "", word.lower()))


for _kind, (_pattern, _first) in _CORE.items():
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^{_pattern}$"), _first)
    if _kind != "null":
        _Loader.add_constructor(_TAG + _kind, _scalar)
Dumper.add_implicit_resolver(_TAG + "bool", re.compile("^[yYnN]$"), list("yYnN"))  # YAML 1.1's, which PyYAML lacks


def _with_texts(node: Node, key: str, texts: frozenset[str]) -> Node:
    """The value of `key`, in which plain words are texts where `texts` expects them; null stays null."""
    if isinstance(node, ScalarNode):
        expected = key in texts and node.tag != f"{_TAG}null"
        return ScalarNode(f"{_TAG}str", node.value, node.start_mark, node.end_mark) if expected else node
    if key and not any(f"{text}.".startswith(f"{key}.") for text in texts):
        return node
    inner: Any
    if isinstance(node, MappingNode):
        inner = [(name, _with_texts(value, f"{key}.{name.value}".lstrip("."), texts)) for name, value in node.value]
    else:
        inner = [_with_texts(value, key, texts) for value in node.value]
    return type(node)(node.tag, inner, node.start_mark, node.end_mark)
