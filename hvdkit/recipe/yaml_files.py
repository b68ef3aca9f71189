"""Reads users' YAML files strictly, with a size limit and short error messages that name the place of a fault."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from hvdkit.errors import RequestError
from hvdkit.files import read_bounded

SCHEMA_LINE = "# yaml-language-server: $schema="
# Hundreds of times the size of a recipe or cluster file; parsing a file of this size takes seconds.
MOST_BYTES = 2**20
# Limit for the values of a document with aliases expanded: nine levels of nine aliases make 10^9.
MOST_VALUES = 10**6
# Far above any number in a recipe or cluster file; Python cannot convert much larger ones to float.
_MOST_BITS = 1000


def load(path: Path, expected: str, missing: str | None = None) -> Any:
    """The content of a YAML file. Raises RequestError, one line with the file and what was `expected`.

    `missing` replaces `expected` in the message about a file that does not exist.
    """
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise RequestError(f"{named(path)}: no such file; expected {missing or expected}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{named(path)}: no text (byte {error.start} is not UTF-8); expected {expected}") from None
    except OSError as error:
        raise RequestError(f"{named(path)}: cannot be read ({error.strerror}); expected {expected}") from None
    return parse(text, named(path))


def parse(text: str, where: str) -> Any:
    """The content of a YAML text. Raises RequestError, one line that begins with `where`, if it is damaged."""
    try:
        return copy.deepcopy(_parsed(text))  # callers modify the result
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RequestError(f"{where}{place}: damaged YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"{where}: damaged YAML: {reason}") from None


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """The content of a YAML text, cached: a report reads the same recipe for each of its runs."""
    return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader


def override(document: dict[str, Any], text: str) -> str | None:
    """Apply one `key=value` to the document; returns an error line, or None."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        return f"override {brief(text)}: expected key=value, such as epochs=2 or optimizer.momentum=0.8"
    *parents, leaf = key.strip().split(".")
    place = document
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            return f"override {brief(text)}: {brief(parent)} holds {brief(inner)}, so nothing can be set below it"
        place = inner
    try:
        place[leaf] = parse(value, f"override {brief(text)}")
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
    """Safe YAML that refuses duplicate keys and large aliases, and reads 1e-4 as a number, like YAML 1.2."""

    def get_single_node(self) -> Node | None:
        node: Node | None = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            fault = f"aliases that stand for more than {MOST_VALUES} values"
            raise ConstructorError(None, None, fault, node.start_mark)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        # PyYAML raises various errors for a value that does not fit its tag (`!!bool maybe`, the date 2026-13-01).
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
            key = self.construct_object(key_node, deep=True)
            fault = None if isinstance(key, str) else f"expected text as key, got {brief(key)}"
            if fault or key in seen:
                fault = fault or f"key {brief(key)} is there twice"
                raise ConstructorError(None, None, fault, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _values(node: Node, known: dict[int, int]) -> int:
    """The number of values of a node with its aliases expanded; a reference to itself counts as one."""
    if isinstance(node, ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1
        parts = [part for pair in node.value for part in pair] if isinstance(node, MappingNode) else node.value
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]
