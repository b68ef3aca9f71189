"""How text becomes tokens, and back: its bytes, or a tokenizer of which nothing but its vocabulary and rules is used.

People save tokenizers as they last used them: with truncation and padding on, with a template that adds special tokens,
with dropout. Text to train on must lose nothing by that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import RequestError
from hvdkit.files import read_bounded

_NEAR = 4096  # characters on both sides of a cut by which it is judged
_BEFORE = (
    256  # characters before a cut that are tokenized again, since some tokenizers treat a text's start in its own way
)
_TRIED = 32  # places for a cut
_UNUSED = {"truncation": "truncation", "padding": "padding", "post_processor": "template"}
_EXPECTED = "expected bytes, a file of `hvdkit tokenizer train`, or a tokenizer.json of the package tokenizers"


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens, whole numbers below `vocabulary`, and back.

    `unknown` is the token of what the tokenizer does not know, with its name; `unused` names the settings of its file
    that are not used. Both functions raise RequestError for a text that the tokenizer cannot take.
    """

    vocabulary: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    unknown: tuple[int, str] | None = None
    unused: tuple[str, ...] = ()


BYTES = Encoding(256, lambda text: list(text.encode()), lambda numbers: bytes(numbers).decode(errors="replace"))


def encoding(name: str) -> Encoding:
    """`bytes`, or the tokenizer in a file (`data.tokens`). A text's own markup, such as `<|endoftext|>`, is the special
    token of that name, in training and for a prompt alike.

    Raises RequestError if the file cannot be read, or the package that reads it is not installed.
    """
    if name == "bytes":
        return BYTES
    path = Path(name)
    content = read(name)
    try:
        document, unused = bare(content)
    except (ValueError, RecursionError) as error:
        raise _no_tokenizer(path, error) from error
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RequestError(
            f"data.tokens: {name}: the package tokenizers is not installed; run `python -m pip install tokenizers` in "
            f"the environment of {sys.executable}"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the package raises no other class
        raise _no_tokenizer(path, error) from error
    ids = tokenizer.get_vocab()
    if not ids:
        raise _no_tokenizer(path, "its vocabulary is empty")

    def encode(text: str) -> list[int]:
        try:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:
            raise RequestError(f"data.tokens: {path}: it cannot take the text ({_brief(error)})") from error

    model, name_of = document["model"], {number: token for token, number in ids.items()}
    number = model.get("unk_id") if "unk_id" in model else ids.get(model.get("unk_token"))
    checked: Callable[[str], list[int]] = encode
    if number is None and "merges" in model:
        checked = _complete(path, tokenizer, encode)
    return Encoding(
        max(ids.values()) + 1,
        checked,
        lambda numbers: tokenizer.decode(numbers, skip_special_tokens=False),
        None if number is None else (number, name_of.get(number, str(number))),
        unused,
    )


def read(name: str) -> bytes:
    """The content of a tokenizer's file. Raises RequestError if it cannot be read."""
    path = Path(name)
    try:
        return read_bounded(path)
    except OSError as error:
        raise RequestError(f"data.tokens: {path}: cannot be read ({error.strerror}); {_EXPECTED}") from error


def bare(content: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A tokenizer.json without what is not its vocabulary, rules or decoder, and the names of what it had of that.

    Raises ValueError if it is none.
    """
    document = json.loads(content)
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ValueError("it has no model")
    unused = [name for key, name in _UNUSED.items() if document.get(key) is not None]
    if isinstance(document.get("post_processor"), dict) and document["post_processor"].get("type") == "ByteLevel":
        unused.remove(_UNUSED["post_processor"])  # it adds nothing
    if document["model"].get("dropout"):
        unused.append("dropout")
        document["model"]["dropout"] = None
    return document | dict.fromkeys(_UNUSED), tuple(unused)


def pieces(texts: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """The tokens of the joined parts, in pieces: the same as if all were encoded at once.

    A piece ends between words, where the tokens on both sides are the same with and without the cut. Where there is no
    such place, it grows.
    """
    before, text = "", ""
    for piece in texts:
        text += piece
        if cut := _safe_cut(text, encode):
            yield _following(before, text[:cut], encode)
            before, text = text[max(0, cut - _BEFORE) : cut], text[cut:]
    if text:
        yield _following(before, text, encode)


def _following(before: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of `text` where it follows `before`."""
    return encode(before + text)[len(encode(before)) :]


def _safe_cut(text: str, encode: Callable[[str], list[int]]) -> int:
    """A place between words, near the end of `text`, at which it can be cut; 0 for none."""
    last = len(text) - _NEAR
    if last <= 0:
        return 0
    cuts: list[int] = []
    for first in (last - _NEAR, last - 16 * _NEAR, 1):
        start = max(1, first)
        cuts = cuts or [start + match.start() for match in re.finditer(r"(?<=\S)\s", text[start:last])]
    for cut in reversed(cuts[-_TRIED:]):
        left, right = text[max(0, cut - _NEAR) : cut], text[cut : cut + _NEAR]
        before, tokens = left[-_BEFORE:], encode(left)
        known, after = encode(before), encode(before + right)
        if after[: len(known)] == known and encode(left + right) == tokens + after[len(known) :]:
            return cut
    return 0


def _complete(path: Path, tokenizer: Any, encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """`encode` for a tokenizer that has no unknown token: it refuses letters that it would leave out."""
    known: set[str] = set()

    def lost(letter: str) -> bool:
        if letter.isspace() or encode(letter) != encode(2 * letter):
            return False
        normalized = tokenizer.normalizer.normalize_str(letter) if tokenizer.normalizer else letter
        split = tokenizer.pre_tokenizer.pre_tokenize_str(normalized) if tokenizer.pre_tokenizer else [normalized]
        return bool(normalized and split)  # else its rules mean to leave it out

    def checked(text: str) -> list[int]:
        new = set(text) - known
        gone = sorted(filter(lost, new))
        if gone:
            shown = ", ".join(map(repr, gone[:5])) + (", …" if len(gone) > 5 else "")
            raise RequestError(
                f"data.tokens: {path}: it has no token for {shown} and would leave it out; expected a tokenizer of "
                "bytes (byte-level or byte_fallback), or one with an unknown token"
            )
        known.update(new)
        return encode(text)

    return checked


def _no_tokenizer(path: Path, reason: object) -> RequestError:
    return RequestError(f"data.tokens: {path}: no tokenizer ({_brief(reason)}); {_EXPECTED}")


def _brief(reason: object) -> str:
    return " ".join(str(reason).split())[:100]
