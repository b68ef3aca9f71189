"""Make the site of README.md and docs/: build/site/index.html, which needs no server and nothing from elsewhere.

make docs        (or: .venv/bin/python -m scripts.site, where hvdkit[docs] is installed)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
_FRAME = "search-frame.js"  # in place of what MkDocs' plugin `offline` would load from elsewhere
_FROM_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#:]+)")


def staged(copy: Path) -> list[Path]:
    """A copy of all pages, with the files that they link to, in the checkout's folders; returns the copied files.

    A link to a folder becomes plain text.
    """
    shutil.rmtree(copy, ignore_errors=True)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    files = set(pages)
    for page in pages:
        targets = {(page.parent / target).resolve() for _, target in _LINK.findall(page.read_text())}
        files |= {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}
    for file in files:
        place = copy / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file in pages:
            place.write_text(_without_folders(file))
        else:
            shutil.copyfile(file, place)
    return sorted(files)


def _without_folders(page: Path) -> str:
    text = page.read_text()
    for words, target in _LINK.findall(text):
        if (page.parent / target).is_dir():
            text = text.replace(f"[{words}]({target})", words)
    return text


def main(folder: Path = ROOT / "build") -> int:
    """Make it in a folder; returns MkDocs' exit status, which is not 0 where a link leads nowhere."""
    staged(folder / "docs")
    settings = yaml.safe_load((ROOT / "docs" / "site.yml").read_text())
    made = folder / "site.yml"
    made.write_text(yaml.safe_dump(settings | {"docs_dir": str(folder / "docs"), "site_dir": str(folder / "site")}))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", made]
    status = subprocess.run(command, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    if status == 0:
        shutil.copyfile(ROOT / "docs" / _FRAME, folder / "site" / _FRAME)
        for page in (folder / "site").rglob("*.html"):
            up = "../" * (len(page.relative_to(folder / "site").parts) - 1)
            page.write_text(page.read_text().replace(_FROM_ELSEWHERE, f"{up}{_FRAME}"))
        print(f"written to {folder / 'site' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
