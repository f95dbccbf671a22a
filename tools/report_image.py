"""Photograph a report: ``python tools/report_image.py report.html docs/report.png``.

Needs the package playwright and a Chromium (``CHROMIUM=/path/to/chromium``, or one on the path).
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path


def main() -> None:
    """Write the top of the page as a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=800, help="0: the whole page")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()

    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": given.width, "height": given.height or 900},
            color_scheme="dark" if given.dark else "light",
        )
        page.goto(given.report.resolve().as_uri())
        page.screenshot(path=given.picture, full_page=given.height == 0)
        browser.close()
    from PIL import Image

    # Not a palette, which gives two devices one colour.
    with Image.open(given.picture) as image:
        image.convert("RGB").save(given.picture, optimize=True)


if __name__ == "__main__":
    main()
