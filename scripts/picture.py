"""A picture of a report for the README: the page on a screen and, beside it, on a phone in dark.

    .venv/bin/python scripts/picture.py runs/compare/report.html docs/images/report.png

Needs Chromium, as the tests of pages do.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import Browser, chromium

SCREEN, PHONE, GAP = 1000, 360, 20
COLOURS = 128


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--height", type=int, default=1050, help="of both screens (default 1050)")
    parser.add_argument("--section", default="throughput", help="where the phone stands (default throughput)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        screen = shot(browser, args.page, SCREEN, args.height, "light")
        phone = shot(browser, args.page, PHONE, args.height, "dark", args.section)
    whole = Image.new("RGB", (screen.width + GAP + phone.width, args.height), "#dee2e6")
    whole.paste(screen, (0, 0))
    whole.paste(phone, (screen.width + GAP, 0))
    whole.quantize(COLOURS).save(args.picture, optimize=True)


def shot(browser: Browser, path: Path, width: int, height: int, scheme: str, section: str = "") -> Image.Image:
    """What a screen of so many CSS pixels shows, from a section's heading on where one is named."""
    page = browser.open(path, width, height, scheme)
    page.run("document.documentElement.style.scrollbarWidth = 'none'")
    if section:
        page.run(f"document.getElementById({'h-' + section!r}).scrollIntoView({{behavior: 'instant'}})")
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        page.picture(Path(file.name), whole=False)
        return Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB")


if __name__ == "__main__":
    main()
