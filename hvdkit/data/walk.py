"""The files that users' folders hold: one walk for texts and for pictures, which counts what it leaves out.

Names are ordered by their bytes, so neither the file system nor the locale has a say in it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path, PurePath

# What systems and programs put into folders; and every name that begins with a dot. Nobody means them as data.
_OF_SYSTEMS = {
    "__MACOSX", "__pycache__", "@eaDir", "lost+found", "System Volume Information", "$RECYCLE.BIN",
    "Thumbs.db", "ehthumbs.db", "desktop.ini", "Desktop.ini", "Icon\r",
}  # fmt: skip
_LINKED = "link to a folder"
_PLURALS = {
    "dangling link": "dangling links", "loop of links": "loops of links", _LINKED: "links to folders",
    "empty file": "empty files", "file without a suffix": "files without a suffix",
    "FIFO, socket or device": "FIFOs, sockets or devices", "folder that cannot be read": "folders that cannot be read",
}  # fmt: skip
_CONVERTIBLE = {".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif"}
_SHOWN = 8  # reasons in a line

NESTED = "in nested folders"


def hidden(name: str) -> bool:
    """Whether a file or folder is none of the data: its name begins with a dot, or a system has made it."""
    return name.startswith(".") or name in _OF_SYSTEMS


def key(name: str) -> bytes:
    """What names are sorted by."""
    return os.fsencode(name)


def folders(folder: Path, left_out: Counter[str] | None = None) -> list[str]:
    """The names of the folders in a folder, and of links to folders, sorted; what is beside them is counted.

    Raises OSError if it cannot be read.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if hidden(entry.name):
                continue
            if (kind := _kind(entry)) in ("folder", _LINKED):
                found.append(entry.name)
            elif left_out is not None:
                left_out["beside the class folders" if kind == "file" else kind] += 1
    return sorted(found, key=key)


def pictures(folder: Path, suffixes: tuple[str, ...], left_out: Counter[str]) -> list[str]:
    """The names of the files in a folder that end in one of these suffixes, in upper or lower case, sorted.

    Others are counted by reason in `left_out`, those of nested folders too. Raises OSError if it cannot be read.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if hidden(entry.name):
                continue
            kind = _kind(entry)
            if kind == "folder":
                left_out[NESTED] += sum(1 for _ in _below(folder / entry.name, left_out))
            elif kind != "file":
                left_out[kind] += 1
            elif entry.name.lower().endswith(suffixes):
                found.append(entry.name)
            else:
                left_out[PurePath(entry.name).suffix.lower() or "file without a suffix"] += 1
    if not left_out[NESTED]:
        del left_out[NESTED]
    return sorted(found, key=key)


def texts(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The files of a folder and of those in it, sorted by their names, folder by folder; empty ones are left out.

    What is left out is counted by reason in `left_out`. Links to folders are not followed. Raises OSError if the
    folder itself cannot be read.
    """
    os.scandir(folder).close()
    found = []
    for path in _below(folder, left_out):
        if path.stat().st_size:
            found.append(path)
        else:
            left_out["empty file"] += 1
    return sorted(found, key=lambda path: [key(part) for part in path.relative_to(folder).parts])


def content(folder: Path) -> str:
    """What a folder has that lacks what was expected, such as `, but 3 folders and 8 .webp files`, or nothing."""
    kinds: Counter[str] = Counter()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not hidden(entry.name):
                kind = _kind(entry)
                kinds[PurePath(entry.name).suffix.lower() or "file without a suffix" if kind == "file" else kind] += 1
    parts = []
    for kind, count in kinds.most_common(3):
        name = f"{kind} file" if kind.startswith(".") else kind
        convert = " (convert them to PNG)" if kind in _CONVERTIBLE else ""
        parts.append(f"{count} {name if count == 1 else _PLURALS.get(name, f'{name}s')}{convert}")
    return f", but {' and '.join(parts)}" if parts else ""


def line(folder: Path | str, left_out: Counter[str]) -> str | None:
    """What was left out of a folder, in a line; None for nothing."""
    total = left_out.total()
    if not total:
        return None
    ordered = sorted(left_out.items(), key=lambda each: (-each[1], each[0]))
    parts = [_named(reason, count) for reason, count in ordered[:_SHOWN]]
    rest = total - sum(count for _, count in ordered[:_SHOWN])
    more = [f"{rest:,} others"] if rest else []
    remedy = "; pictures are taken from a class's own folder: move them up" if NESTED in left_out else ""
    return f"{folder}: {total:,} {'file' if total == 1 else 'files'} left out: {', '.join([*parts, *more])}{remedy}"


def _named(reason: str, count: int) -> str:
    convert = " (convert them to PNG)" if reason in _CONVERTIBLE else ""
    return f"{count:,} {reason if count == 1 else _PLURALS.get(reason, reason)}{convert}"


def _below(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The files of a folder and of all real folders in it, in any order."""
    found, open_ = [], [folder]
    while open_:
        place = open_.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if hidden(entry.name):
                        continue
                    kind = _kind(entry)
                    if kind == "folder":
                        open_.append(place / entry.name)
                    elif kind == "file":
                        found.append(place / entry.name)
                    else:
                        left_out[kind] += 1
        except OSError:
            left_out["folder that cannot be read"] += 1
    return found


def _kind(entry: os.DirEntry[str]) -> str:
    """`file`, `folder`, or why it is neither."""
    try:
        if not entry.is_symlink():
            return "folder" if entry.is_dir() else "file" if entry.is_file() else "FIFO, socket or device"
        mode = entry.stat().st_mode
    except OSError as error:
        return "loop of links" if error.errno == errno.ELOOP else "dangling link"
    if stat.S_ISDIR(mode):
        return _LINKED
    return "file" if stat.S_ISREG(mode) else "FIFO, socket or device"
