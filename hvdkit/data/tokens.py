"""The tokens of a text: made once, kept in a cache by the text's content, and read as memory maps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from hvdkit.data import walk
from hvdkit.errors import RequestError, RunError
from hvdkit.files import advice, open_regular, read_bounded, write_atomic
from hvdkit.recipe.data import Text
from hvdkit.runtimes.store import cache

if TYPE_CHECKING:  # ranks find the tokens made
    from hvdkit.data.encoding import Encoding

_BLOCK = 2**20  # bytes that are tokenized at once, up to the end of a line
_LONGEST = 2**16  # bytes of a line, so that a text without line ends needs no more memory
_FILES = "train.bin", "val.bin"
_FORMAT = "2"  # of the cache, and of what a text is
_OTHERS = {  # what to do with files that are no UTF-8, by how they begin; of two that fit the first
    "convert it by `iconv -f UTF-32 -t UTF-8`": (BOM_UTF32_LE, BOM_UTF32_BE),
    "convert it by `iconv -f UTF-16 -t UTF-8`": (BOM_UTF16_LE, BOM_UTF16_BE),
    "it is compressed: unpack it": (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ"),
    "it is an archive, a document or a table: take its text out": (b"PK\3\4", b"%PDF", b"PAR1"),
}
_MOST_NULS = 10  # one in so many bytes of a text
_SETTLED_NS = 2 * 10**9  # file systems' clocks may tick as slowly


@dataclass(frozen=True)
class Tokens:
    """The tokens of the training and the validation part, (n,) each, as unsigned whole numbers below `vocabulary`.

    `val_bytes` is the size of the validation part as UTF-8, `digest` the SHA-256 of the whole text. `left_out` has a
    line for each thing that is not in the tokens.
    """

    train: np.ndarray
    val: np.ndarray
    val_bytes: int
    vocabulary: int
    digest: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Record:
    """`tokens.json` of the cache, beside `train.bin` and `val.bin`; `left_out` is about the tokenizer."""

    dtype: str
    train: int
    val: int
    val_bytes: int
    vocabulary: int
    left_out: list[str]


@lru_cache(maxsize=1)  # the runs of a comparison have the same text
def open_tokens(data: Text) -> Tokens:
    """The tokens of a recipe's text; the end, from a line's beginning on, is the validation part.

    Raises RequestError if files are missing, empty or no UTF-8, or the cache cannot be written.
    """
    digest, size = _digest(data)
    by = "bytes"
    if data.tokens != "bytes":
        from hvdkit.data.encoding import read

        by = hashlib.sha256(read(data.tokens)).hexdigest()
    kept = hashlib.sha256(f"{_FORMAT} {digest} {by} {data.validation}".encode()).hexdigest()
    folder = cache() / "tokens" / kept
    if not folder.is_dir():
        _make(folder, data, size, digest)
    record = _Record(**json.loads(read_bounded(folder / "tokens.json")))
    train, val = (
        np.memmap(folder / name, record.dtype, "r", shape=(count,)) if count else np.empty(0, record.dtype)
        for name, count in zip(_FILES, (record.train, record.val), strict=True)
    )
    left_out = [f"data.tokens: {data.tokens}: {line}" for line in record.left_out]
    if data.path is not None:
        others: Counter[str] = Counter()
        files(Path(data.path), others)
        left_out += [line] if (line := walk.line(data.path, others)) else []
    return Tokens(train, val, record.val_bytes, record.vocabulary, digest, tuple(left_out))


def _make(folder: Path, data: Text, size: int, digest: str) -> None:
    """Write the tokens into `folder`, which is there only once it is complete."""
    from hvdkit.data.encoding import encoding

    used = encoding(data.tokens)
    vocabulary = used.vocabulary
    dtype = next(kind for kind in ("uint8", "uint16", "uint32") if vocabulary <= np.iinfo(kind).max + 1)
    counts, sizes, unknown, read = [0, 0], [0, 0], 0, hashlib.sha256()
    cut = round(size * (1 - data.validation))

    def halves() -> Iterator[tuple[int, bytes]]:
        """Each block with its part, which is 1 from the first line after the byte `cut` on."""
        for block in blocks(data, cut):
            half = int(sum(sizes) >= cut)
            sizes[half] += len(block)
            read.update(block)
            yield half, block

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
        try:
            for half, run in groupby(halves(), itemgetter(0)):
                with (scratch / _FILES[half]).open("wb") as file:
                    for numbers in _numbers((block for _, block in run), used):
                        file.write(numbers.astype(dtype).tobytes())
                        counts[half] += len(numbers)
                        unknown += 0 if used.unknown is None else int((numbers == used.unknown[0]).sum())
            if read.hexdigest() != digest:
                raise RequestError(f"data.path: {data.path}: the text has changed while it was read; start again")
            left_out = _left_out(used, unknown, sum(counts))
            record = _Record(dtype, counts[0], counts[1], sizes[1], vocabulary, left_out)
            (scratch / "tokens.json").write_text(json.dumps(asdict(record)))
            if not folder.is_dir():
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if folder.is_dir():  # another rank was faster
            return
        raise RequestError(
            f"{folder}: the tokens cannot be written ({error.strerror}); {advice(error)}, or set XDG_CACHE_HOME to "
            "a folder of yours"
        ) from error


def _numbers(run: Iterator[bytes], used: Encoding) -> Iterator[np.ndarray]:
    """The tokens of a text, (n,) for each of its pieces."""
    from hvdkit.data.encoding import BYTES, pieces

    if used is BYTES:
        yield from (np.frombuffer(block, np.uint8) for block in run)
    else:
        yield from (np.asarray(numbers) for numbers in pieces((block.decode() for block in run), used.encode))


def _left_out(used: Encoding, unknown: int, total: int) -> list[str]:
    """Lines about what the tokens do not have of the text, and what of the tokenizer's file is not used."""
    lines = []
    if used.unused:
        lines.append(f"not used: its {' and '.join(used.unused)}; a text is tokenized as it is")
    if unknown and used.unknown:
        lines.append(f"{unknown:,} of {total:,} tokens are {used.unknown[1]!r}: it has no token for that text")
    return lines


def _digest(data: Text) -> tuple[str, int]:
    """The SHA-256 of the whole text, and its size in bytes. Raises RequestError if a file is no UTF-8, or all empty.

    Files that are as they were when the digest was taken last are not read again.
    """
    known = _known_digest(data)
    with suppress(OSError, ValueError, TypeError):
        if known:
            digest, size = json.loads(read_bounded(known))
            return str(digest), int(size)
    read = _read_digest(data)
    with suppress(OSError, RunError):  # it is a matter of time only
        if known:
            known.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(known, json.dumps(read))
    return read


def _known_digest(data: Text) -> Path | None:
    """The file with the digest of these files, by their paths, sizes, times and inodes.

    None for Python's own text, and for a file so new that a change might leave its time as it is.
    """
    if data.path is None:
        return None
    try:
        stats = {str(path): path.stat() for path in files(Path(data.path).absolute())}
    except OSError:
        return None
    if any(time.time_ns() - stat.st_mtime_ns < _SETTLED_NS for stat in stats.values()):
        return None
    marks = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for path, stat in stats.items()]
    return cache() / "tokens" / "digests" / f"{hashlib.sha256(json.dumps([_FORMAT, marks]).encode()).hexdigest()}.json"


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
    done, paths = 0, files(Path(data.path))
    for path in paths:
        offset = 0
        try:
            with open_regular(path) as file:
                if file.peek(3)[:3] == BOM_UTF8:
                    offset = len(file.read(3))
                while lines := _lines(file, closed=path != paths[-1]):
                    pieces, done = _cut(lines, cut, done)
                    for piece in pieces:
                        piece.decode()
                        if not offset and (nuls := piece.count(0)) > len(piece) // _MOST_NULS:
                            raise RequestError(
                                f"data.path: {path}: expected UTF-8, got {nuls:,} NUL bytes among the first "
                                f"{len(piece):,}: it is UTF-16, which `iconv -f UTF-16LE -t UTF-8` converts, or no text"
                            )
                        yield piece
                        offset += len(piece)
        except OSError as error:
            raise RequestError(f"data.path: {path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            near = error.object[max(0, error.start - 20) : error.start + 5]
            remedies = (remedy for remedy, starts in _OTHERS.items() if not offset and error.object.startswith(starts))
            raise RequestError(
                f"data.path: {path}: expected UTF-8, got the byte {error.object[error.start]:#04x} at offset "
                f"{offset + error.start:,}, in {near!r}; {next(remedies, 'convert it by `iconv -t UTF-8`')}"
            ) from None


def _lines(file: BinaryIO, closed: bool) -> list[bytes]:
    """The next lines, `_BLOCK` bytes or a few more; a line is cut after `_LONGEST` bytes, after a whole character.

    With `closed` the file's last line gets an end if it has none.
    """
    lines, size = [], 0
    while size < _BLOCK and (line := file.readline(_LONGEST)):
        if not line.endswith(b"\n"):
            inside = 0  # bytes of a character, at most three after its first
            after = file.read(4)
            while inside < min(3, len(after)) and after[inside] & 0xC0 == 0x80:
                inside += 1
            line += after[:inside]
            file.seek(inside - len(after), os.SEEK_CUR)
            if closed and inside == len(after) and not line.endswith(b"\r"):
                line += b"\n"
        lines.append(line)
        size += len(line)
    return lines


def _cut(lines: list[bytes], cut: int, done: int = 0) -> tuple[list[bytes], int]:
    """The lines as one block, or two if the first byte after `cut` that begins a line is inside; and the new `done`."""
    starts = np.cumsum([done, *map(len, lines)])
    index = int(np.searchsorted(starts[:-1], cut))
    halves = [b"".join(lines[:index]), b"".join(lines[index:])]
    return [half for half in halves if half], int(starts[-1])


def files(path: Path, left_out: Counter[str] | None = None) -> list[Path]:
    """The file, or the files of the folder and of those in it, as `walk.texts` lists them; others are counted.

    Raises RequestError if there are none.
    """
    try:
        paths = walk.texts(path, Counter() if left_out is None else left_out)
    except NotADirectoryError:
        return [path]
    except FileNotFoundError:
        raise RequestError(
            f"data.path: {path}: no such file or folder; expected a UTF-8 file, or a folder of them"
        ) from None
    except OSError as error:
        raise RequestError(f"data.path: {path}: cannot be read ({error.strerror}); expected UTF-8 files") from error
    if not paths:
        has = walk.content(path)
        raise RequestError(f"data.path: {path}: no files with text in it{has}; expected UTF-8 files")
    return paths


def _english() -> str:
    """The English text that Python ships: the reference's topics, sorted by name."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
