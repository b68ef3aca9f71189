"""Make the site of README.md and docs/: build/site/index.html, which needs no server and nothing from elsewhere.

make docs        (or: .venv/bin/python -m scripts.site, where hvdkit[docs] is installed)

Each version has its folder, build/site/VERSION. One that is there is made anew, others are left, and each page has a
menu of all. build/site/index.html leads to the newest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from hvdkit import __version__

ROOT = Path(__file__).parents[1]
_SCRIPT, _STYLE = "site.js", "site.css"  # the script also stands in for what MkDocs' plugin `offline` would load
_FROM_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
_FILE = re.compile(r"(?<=\[)[\w/-]+\.md(?=\]\(([^)\s#:]+\.md)(?:#[^)]*)?\))")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#:]+)")


def staged(copy: Path) -> list[Path]:
    """A copy of all pages, with the files that they link to, in the checkout's folders; returns the copied files.

    A link to a folder becomes plain text, and a link whose text is a page's file shows the page's title.
    """
    shutil.rmtree(copy, ignore_errors=True)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    pages += ROOT.glob("examples/**/*.md")
    files = {*pages, ROOT / "docs" / _STYLE}
    for page in pages:
        targets = {(page.parent / target).resolve() for _, target in _LINK.findall(page.read_text())}
        files |= {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}
    for file in files:
        place = copy / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file in pages:
            place.write_text(_for_readers(file))
        else:
            shutil.copyfile(file, place)
    return sorted(files)


def _for_readers(page: Path) -> str:
    text = page.read_text()
    if page.parent.name == "benchmarks" or page.name == "CHANGELOG.md":
        text = f"---\nsearch:\n  boost: 0.1\n---\n{text}"  # guides come before records of measurements and changes
    for words, target in _LINK.findall(text):
        if (page.parent / target).is_dir():
            text = text.replace(f"[{words}]({target})", words)
    return _FILE.sub(lambda match: _title(page.parent / match[1]) or match[0], text)


def _title(page: Path) -> str | None:
    """What the first line of a page says, without code and links."""
    first = page.read_text().partition("\n")[0] if page.exists() else ""
    return re.sub(r"[`\[\]]", "", first.removeprefix("# ")) if first.startswith("# ") else None


def listed(folder: Path) -> list[str]:
    """The versions whose pages lie in a site's folder, newest first; writes the menu of them, and what leads there."""
    found = [path.parent.name for path in folder.glob("*/index.html")]
    found.sort(key=lambda version: [int(part) for part in re.findall(r"\d+", version)], reverse=True)
    (folder / "versions.js").write_text(f"window.hvdkitVersions = {json.dumps(found)};\n")
    leads = f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={found[0]}/index.html">'
    (folder / "index.html").write_text(f'<!doctype html>{leads}<a href="{found[0]}/index.html">hvdkit {found[0]}</a>\n')
    return found


def main(folder: Path = ROOT / "build") -> int:
    """Make it in a folder; returns MkDocs' exit status, which is not 0 where a link leads nowhere."""
    staged(folder / "docs")
    settings = yaml.safe_load((ROOT / "docs" / "site.yml").read_text())
    made, site = folder / "site.yml", folder / "site" / __version__
    made.write_text(yaml.safe_dump(settings | {"docs_dir": str(folder / "docs"), "site_dir": str(site)}))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", made]
    status = subprocess.run(command, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    if status == 0:
        shutil.copyfile(ROOT / "docs" / _SCRIPT, site / _SCRIPT)
        (site / "404.html").unlink()  # for servers, with addresses from their root
        for page in site.rglob("*.html"):
            up = "../" * (len(page.relative_to(site).parts) - 1)
            text = page.read_text().replace(_FROM_ELSEWHERE, f"{up}{_SCRIPT}")
            text = text.replace("<html ", f'<html data-version="{__version__}" data-root="{up}../" ', 1)
            page.write_text(text.replace("</head>", f'<script src="{up}../versions.js"></script></head>', 1))
        listed(folder / "site")
        print(f"written to {folder / 'site' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
