"""The patches of Horovod's source: the files in `patches/`, in the order of their names.

A patch is a unified diff. Its head, in the form of a mail's, says what goes wrong without it (`Symptom`), why
(`Cause`), which frameworks it is for (`For`: `all`, or one or more requirements such as `torch >=2.1; mxnet >=1.9`),
where Horovod's users discuss it (`Upstream`), and which test fails without it (`Test`).

Patches apply without fuzz and without offsets, so one that is not for every build must come after those that change
the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import Parser
from functools import cache
from pathlib import Path, PurePosixPath

import whatthepatch
from packaging.requirements import Requirement
from whatthepatch.exceptions import WhatThePatchException

from hvdkit.errors import RunError

FOLDER = Path(__file__).with_name("patches")
_ALL = "all"


@dataclass(frozen=True)
class Patch:
    """One file of the folder: its name, the fields of its head, and its diff."""

    name: str
    symptom: str
    cause: str
    frameworks: tuple[Requirement, ...]  # any of them; empty: every build
    upstream: str
    test: str
    diff: str

    def is_for(self, versions: Mapping[str, str]) -> bool:
        """Whether a build against these frameworks (module to version, as in `torch: 2.13.0+cpu`) needs the patch."""
        installed = [one for one in self.frameworks if one.name in versions]
        return not self.frameworks or any(one.specifier.contains(versions[one.name], True) for one in installed)


@cache
def every() -> tuple[Patch, ...]:
    """All patches, in the order in which they apply."""
    return tuple(_read(path) for path in sorted(FOLDER.glob("*.patch")))


def chosen(versions: Mapping[str, str]) -> list[Patch]:
    """The patches for a build against these frameworks (module to version), in order."""
    return [patch for patch in every() if patch.is_for(versions)]


def apply(source: Path, patches: Iterable[Patch]) -> None:
    """Apply `patches` to the unpacked sdist in `source`, in order.

    Raises RunError with the name of the patch and the file that it does not fit; files before that one are changed.
    """
    for patch in patches:
        for diff in whatthepatch.parse_patch(patch.diff):
            path = source / PurePosixPath(diff.header.new_path.removeprefix("b/"))
            try:
                is_new = all(change.old is None for change in diff.changes)
                old = "" if is_new else path.read_text(encoding="utf-8")
                new = whatthepatch.apply_diff(diff, old)
            except (OSError, UnicodeDecodeError, WhatThePatchException) as error:
                raise RunError(
                    f"{patch.name} does not fit this Horovod: {path}: {error}; expected the released "
                    f"{source.name}, so remove the cached sdist and build again"
                ) from error
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(new) + "\n", encoding="utf-8")


def fingerprint(patches: Iterable[Patch]) -> str:
    """SHA-256, in hex, of the patches' diffs: another diff, another wheel. Another head changes nothing."""
    return hashlib.sha256("".join(patch.diff for patch in patches).encode()).hexdigest()


def _read(path: Path) -> Patch:
    message = Parser().parsestr(path.read_text(encoding="utf-8"))
    symptom, cause, frameworks, upstream, test = (
        " ".join(message[field].split()) for field in ("Symptom", "Cause", "For", "Upstream", "Test")
    )
    wanted = () if frameworks == _ALL else tuple(Requirement(one) for one in frameworks.split(";"))
    return Patch(path.name, symptom, cause, wanted, upstream, test, str(message.get_payload()))
