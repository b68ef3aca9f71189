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
    names = []
    for entry in visible(folder):
        if (kind := _kind(entry)) in ("folder", _LINKED):
            names.append(entry.name)
        elif left_out is not None:
            left_out["beside the class folders" if kind == "file" else kind] += 1
    return sorted(names, key=key)


def pictures(folder: Path, suffixes: tuple[str, ...], left_out: Counter[str]) -> list[str]:
    """The names of the files in a folder that end in one of these suffixes, in upper or lower case, sorted.

    Others are counted by reason in `left_out`, those of nested folders too. Raises OSError if it cannot be read.
    """
    names = []
    for entry in visible(folder):
        kind = _kind(entry)
        if kind == "file" and entry.name.lower().endswith(suffixes):
            names.append(entry.name)
        elif kind == "folder":
            if nested := len(_below(folder / entry.name, left_out)):
                left_out[NESTED] += nested
        else:
            left_out[_suffix(entry.name) if kind == "file" else kind] += 1
    # the order of letters is that of their bytes; that of bytes which are no letters is another one
    return sorted(names, key=None if all(map(str.isascii, names)) else key)


def texts(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The files of a folder and of those in it, sorted by their names, folder by folder; empty ones are left out.

    What is left out is counted by reason in `left_out`. Links to folders are not followed. Raises OSError if the
    folder itself cannot be read.
    """
    os.scandir(folder).close()
    names = []
    for entry in _below(folder, left_out):
        if entry.stat().st_size:
            names.append(os.path.relpath(entry.path, folder))
        else:
            left_out["empty file"] += 1
    return [folder / name for name in sorted(names, key=lambda name: key(name).split(b"/"))]


def content(folder: Path) -> str:
    """What a folder has that lacks what was expected, such as `, but 3 folders and 8 .webp files`, or nothing."""
    kinds: Counter[str] = Counter()
    with suppress(OSError):
        for entry in visible(folder):
            kind = _kind(entry)
            kinds[_suffix(entry.name) if kind == "file" else kind] += 1
    counted = [
        _counted(kind, f"{kind} file" if kind[0] == "." else kind, count, "s") for kind, count in kinds.most_common(3)
    ]
    return f", but {' and '.join(counted)}" if counted else ""


def line(folder: Path | str, left_out: Counter[str]) -> str | None:
    """What was left out of a folder, in a line; None for nothing."""
    total = left_out.total()
    if not total:
        return None
    ordered = sorted(left_out.items(), key=lambda reason: (-reason[1], reason[0]))
    shown = [_counted(reason, reason, count) for reason, count in ordered[:_SHOWN]]
    rest = total - sum(count for _, count in ordered[:_SHOWN])
    more = [f"{rest:,} others"] if rest else []
    remedy = "; pictures are taken from a class's own folder: move them up" if NESTED in left_out else ""
    return f"{folder}: {total:,} {'file' if total == 1 else 'files'} left out: {', '.join([*shown, *more])}{remedy}"


def _counted(kind: str, name: str, count: int, plural: str = "") -> str:
    convert = " (convert them to PNG)" if kind in _CONVERTIBLE else ""
    return f"{count:,} {name if count == 1 else _PLURALS.get(name, name + plural)}{convert}"


def visible(folder: Path | str) -> list[os.DirEntry[str]]:
    """What is in a folder but for hidden names, in any order. Raises OSError."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not hidden(entry.name)]


def _below(folder: Path, left_out: Counter[str]) -> list[os.DirEntry[str]]:
    """The files of a folder and of all real folders in it, in any order."""
    kept: list[os.DirEntry[str]] = []
    open_ = [str(folder)]
    while open_:
        try:
            entries = visible(open_.pop())
        except OSError:
            left_out["folder that cannot be read"] += 1
            continue
        for entry in entries:
            kind = _kind(entry)
            if kind == "folder":
                open_.append(entry.path)
            elif kind == "file":
                kept.append(entry)
            else:
                left_out[kind] += 1
    return kept


def _suffix(name: str) -> str:
    return PurePath(name).suffix.lower() or "file without a suffix"


def _kind(entry: os.DirEntry[str]) -> str:
    """`file`, `folder`, or why it is neither."""
    try:
        if entry.is_file(follow_symlinks=False):
            return "file"
        if not entry.is_symlink():
            return "folder" if entry.is_dir() else "FIFO, socket or device"
        mode = entry.stat().st_mode
    except OSError as error:
        return "loop of links" if error.errno == errno.ELOOP else "dangling link"
    if stat.S_ISDIR(mode):
        return _LINKED
    return "file" if stat.S_ISREG(mode) else "FIFO, socket or device"
