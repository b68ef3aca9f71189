"""`make release`: build the sdist, the wheel that is built from it, and their SHA256SUMS into `dist/`.

Exit status 2, with a line for each fault, where `hvdkit.__version__`, CHANGELOG.md and CITATION.cff do not say the
same, files are not committed, or a package index would refuse the metadata.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml
from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
SUMS = "SHA256SUMS"
_HEADING = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)


def version_of(root: Path) -> str:
    """`hvdkit.__version__` of a checkout, which is not imported."""
    return re.findall(r'^__version__ = "(.+)"$', (root / "hvdkit" / "__init__.py").read_text(), re.MULTILINE)[0]


def faults(root: Path) -> list[str]:
    """What keeps the checkout from being released: one line each."""
    version = version_of(root)
    sections = _HEADING.findall((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    found = []
    if sections and sections[0][0] == "Unreleased" and sections.pop(0)[1].strip():
        found.append("CHANGELOG.md: Unreleased has entries; move them below a heading of this release")
    heading = re.fullmatch(r"(\S+) \((\d{4}-\d\d-\d\d)\)", sections[0][0] if sections else "")
    if heading is None or heading[1] != version:
        return [*found, f"CHANGELOG.md: expected the heading '## {version} (YYYY-MM-DD)' first"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    for key, expected in (("version", version), ("date-released", heading[2])):
        if str(citation.get(key)) != expected:
            found.append(f"CITATION.cff: {key}: expected {expected}, got {citation.get(key)}")
    return found


def uncommitted(root: Path) -> list[str]:
    """A line where the checkout holds what git does not: it would be part of the sdist."""
    done = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    changed = done.stdout.splitlines()
    return (
        [f"{len(changed)} files are not committed, such as {changed[0][3:]}; commit or remove them"] if changed else []
    )


def build(root: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist of the checkout, and the wheel built from that sdist alone; earlier ones in `folder` are removed.

    Raises CalledProcessError where a build fails, ValueError for what `check` finds.
    """
    for old in folder.glob("hvdkit-*"):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, root], check=True, stdout=subprocess.PIPE)
    (sdist,), (wheel,) = folder.glob("hvdkit-*.tar.gz"), folder.glob("hvdkit-*.whl")
    check(wheel, version_of(root))
    sums = [f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made.name}\n" for made in (sdist, wheel)]
    (folder / SUMS).write_text("".join(sums))
    return sdist, wheel


def check(wheel: Path, version: str) -> None:
    """Raise ValueError where the metadata is not valid, or of another version, or without what people read first."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"hvdkit-{version}.dist-info/METADATA")
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        raise ValueError("\n".join(f"{wheel.name}: {error}" for error in group.exceptions)) from group
    if str(metadata.version) != version or not metadata.description or not metadata.requires_python:
        raise ValueError(f"{wheel.name}: expected version {version}, a description and the Python that it needs")


def main() -> int:
    """The exit status."""
    if found := [*faults(ROOT), *uncommitted(ROOT)]:
        print("\n".join(found), file=sys.stderr)
        return 2
    try:
        made = build(ROOT, ROOT / "dist")
    except (ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(str(path.relative_to(ROOT)) for path in (*made, ROOT / "dist" / SUMS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
