"""The tokens of a text: made once, kept in a cache by the text's content, and read as memory maps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hvdkit.errors import RequestError, RunError
from hvdkit.files import open_regular, read_bounded, write_atomic
from hvdkit.recipe.data import Text
from hvdkit.runtimes.store import cache

_BLOCK = 2**20  # bytes that are tokenized at once, up to the end of a line
_LONGEST = 2**16  # bytes of a line, so that a text without line ends needs no more memory
_FORMAT = "1"  # of the cache
_SETTLED_NS = 2 * 10**9  # file systems' clocks may tick as slowly


@dataclass(frozen=True)
class Tokens:
    """The tokens of the training and the validation part, (n,) each, as unsigned whole numbers below `vocabulary`.

    `val_bytes` is the size of the validation part as UTF-8, `digest` the SHA-256 of the whole text.
    """

    train: np.ndarray
    val: np.ndarray
    val_bytes: int
    vocabulary: int
    digest: str


@dataclass(frozen=True)
class _Record:
    """`tokens.json` of the cache, beside `train.bin` and `val.bin`."""

    dtype: str
    train: int
    val: int
    val_bytes: int
    vocabulary: int


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens, whole numbers below `vocabulary`, and back; `digest` names it in the cache."""

    vocabulary: int
    digest: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


BYTES = Encoding(256, "bytes", lambda text: list(text.encode()), lambda found: bytes(found).decode(errors="replace"))


@lru_cache(maxsize=1)  # the runs of a comparison have the same text
def open_tokens(data: Text) -> Tokens:
    """The tokens of a recipe's text; the end, from a line's beginning on, is the validation part.

    Raises RequestError if files are missing, empty or no UTF-8, or the cache cannot be written.
    """
    digest, size = _digest(data)
    used = encoding(data.tokens)
    kept = hashlib.sha256(f"{_FORMAT} {digest} {used.digest} {data.validation}".encode()).hexdigest()
    folder = cache() / "tokens" / kept
    if not folder.is_dir():
        _make(folder, data, size, used)
    record = _Record(**json.loads(read_bounded(folder / "tokens.json")))
    train, val = (_mapped(folder / name, record.dtype, count) for name, count in _parts(record).items())
    return Tokens(train, val, record.val_bytes, record.vocabulary, digest)


def _parts(record: _Record) -> dict[str, int]:
    return {"train.bin": record.train, "val.bin": record.val}


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _make(folder: Path, data: Text, size: int, used: Encoding) -> None:
    """Write the tokens into `folder`, which is there only once it is complete."""
    vocabulary = used.vocabulary
    dtype = next(kind for kind in ("uint8", "uint16", "uint32") if vocabulary <= np.iinfo(kind).max + 1)
    first_of_val, done, counts, val_bytes = round(size * (1 - data.validation)), 0, [0, 0], 0
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
        try:
            with (scratch / "train.bin").open("wb") as train, (scratch / "val.bin").open("wb") as val:
                for block in blocks(data, first_of_val):
                    part = int(done >= first_of_val)
                    found = np.frombuffer(block, np.uint8) if used is BYTES else used.encode(block.decode())
                    found = np.asarray(found, dtype)
                    (val if part else train).write(found.tobytes())
                    counts[part] += len(found)
                    done += len(block)
                    val_bytes += part * len(block)
            record = _Record(dtype, counts[0], counts[1], val_bytes, vocabulary)
            (scratch / "tokens.json").write_text(json.dumps(asdict(record)))
            if not folder.is_dir():
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if folder.is_dir():  # another rank was faster
            return
        raise RequestError(
            f"{folder}: the tokens cannot be written ({error.strerror}); free space, or set XDG_CACHE_HOME to a folder "
            "of yours"
        ) from error


def _digest(data: Text) -> tuple[str, int]:
    """The SHA-256 of the whole text, and its size in bytes. Raises RequestError if a file is no UTF-8, or all empty.

    Files that are as they were when the digest was taken last are not read again.
    """
    known = _known_digest(data)
    with suppress(OSError, ValueError, TypeError):
        if known:
            digest, size = json.loads(read_bounded(known))
            return str(digest), int(size)
    found = _read_digest(data)
    with suppress(OSError, RunError):  # it is a matter of time only
        if known:
            known.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(known, json.dumps(found))
    return found


def _known_digest(data: Text) -> Path | None:
    """The file with the digest of these files, by their paths, sizes, times and inodes.

    None for Python's own text, and for a file so new that a change might leave its time as it is.
    """
    if data.path is None:
        return None
    try:
        found = {str(path): path.stat() for path in files(Path(data.path).expanduser().absolute())}
    except OSError:
        return None
    if any(time.time_ns() - each.st_mtime_ns < _SETTLED_NS for each in found.values()):
        return None
    marks = [(path, each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino) for path, each in found.items()]
    return cache() / "tokens" / "digests" / f"{hashlib.sha256(json.dumps(marks).encode()).hexdigest()}.json"


def _read_digest(data: Text) -> tuple[str, int]:
    total, size = hashlib.sha256(), 0
    for block in blocks(data):
        total.update(block)
        size += len(block)
    if not size:
        raise RequestError(f"data.path: {data.path}: no text in it; expected a UTF-8 file, or a folder of them")
    return total.hexdigest(), size


def blocks(data: Text, cut: int = 0) -> Iterator[bytes]:
    """The text in blocks that end with a line, one of which begins with the first line from the byte `cut` on.

    Raises RequestError if a file cannot be read or is no UTF-8.
    """
    if data.path is None:
        yield from _cut([line.encode() for line in _english().splitlines(keepends=True)], cut)[0]
        return
    done = 0
    for path in files(Path(data.path).expanduser()):
        offset = 0
        try:
            with open_regular(path) as file:
                while lines := _lines(file):
                    parts, done = _cut(lines, cut, done)
                    for part in parts:
                        part.decode()
                        yield part
                        offset += len(part)
        except OSError as error:
            raise RequestError(f"data.path: {path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            near = error.object[max(0, error.start - 20) : error.start + 5]
            raise RequestError(
                f"data.path: {path}: expected UTF-8, got the byte {error.object[error.start]:#04x} at offset "
                f"{offset + error.start:,}, in {near!r}; convert it by `iconv -t UTF-8`"
            ) from None


def _lines(file: BinaryIO) -> list[bytes]:
    """The next lines, `_BLOCK` bytes or a few more; a line is cut after `_LONGEST` bytes, behind a whole character."""
    found, size = [], 0
    while size < _BLOCK and (line := file.readline(_LONGEST)):
        if len(line) == _LONGEST and not line.endswith(b"\n"):
            inside = 0  # bytes of a character, at most three after its first
            after = file.read(4)
            while inside < min(3, len(after)) and after[inside] & 0xC0 == 0x80:
                inside += 1
            line += after[:inside]
            file.seek(inside - len(after), os.SEEK_CUR)
        found.append(line)
        size += len(line)
    return found


def _cut(lines: list[bytes], cut: int, done: int = 0) -> tuple[list[bytes], int]:
    """The lines as one block, or two if the first byte after `cut` that begins a line is inside; and the new `done`."""
    starts = np.cumsum([done, *map(len, lines)])
    place = int(np.searchsorted(starts[:-1], cut))
    parts = [b"".join(lines[:place]), b"".join(lines[place:])]
    return [part for part in parts if part], int(starts[-1])


def files(path: Path) -> list[Path]:
    """The file, or all files below the folder but hidden ones, sorted. Raises RequestError if there are none."""
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
        if not found:
            raise RequestError(f"data.path: {path}: no files in it; expected UTF-8 files")
        return found
    if not os.path.lexists(path):
        raise RequestError(f"data.path: {path}: no such file or folder; expected a UTF-8 file, or a folder of them")
    return [path]


def _english() -> str:
    """The English text that Python ships: the reference's topics, sorted by name."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def encoding(name: str) -> Encoding:
    """`bytes`, or the tokenizer in a file (`data.tokens`).

    Raises RequestError if the file cannot be read, or the package that reads it is not installed.
    """
    if name == "bytes":
        return BYTES
    path = Path(name).expanduser()
    try:
        content = read_bounded(path)
    except OSError as error:
        raise RequestError(
            f"data.tokens: {path}: cannot be read ({error.strerror}); expected bytes, or a file of `hvdkit tokenizer "
            "train`"
        ) from error
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RequestError(
            f"data.tokens: {name}: the package tokenizers is not installed; run `python -m pip install tokenizers` in "
            f"the environment of {sys.executable}"
        ) from None
    try:
        found = Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises no other class
        reason = " ".join(str(error).split())[:100]
        raise RequestError(
            f"data.tokens: {path}: no tokenizer ({reason}); expected a file of `hvdkit tokenizer train`"
        ) from error
    return Encoding(
        found.get_vocab_size(), hashlib.sha256(content).hexdigest(), lambda text: found.encode(text).ids, found.decode
    )
