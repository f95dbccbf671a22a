"""The page in a real browser: nothing fetched, nothing complained about, nothing cut off.

Needs the package ``playwright`` and a Chromium (``CHROMIUM=/path/to/chromium`` or one on the path).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.runs import invented_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from lantern_accel_profiles.report.comparison import compare
    from lantern_accel_profiles.report.render import write

    runs = [
        invented_run("one", batches=(1, 4)),
        invented_run("two", device="A device with a rather long name, 141 GB", speed=900),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    write(compare(runs), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_without_a_complaint(
    browser: Any, page_file: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert said == []
    outside = [url for url in asked if not url.startswith("data:")]
    assert outside == [page_file.as_uri()]
    element = "document.documentElement"
    assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
    # No frame has to be dragged sideways either: on a phone tables are cards.
    frames = "[...document.querySelectorAll('.frame')].filter(f => f.offsetParent)"
    assert page.evaluate(f"{frames}.every(f => f.scrollWidth <= f.clientWidth + 1)")
    small = (
        "[...document.querySelectorAll('figure svg')].filter(s => s.checkVisibility())"
        ".map(s => s.getBoundingClientRect().width)"
    )
    assert min(page.evaluate(small)) > 300
    colours = page.evaluate(
        "(() => { const s = getComputedStyle(document.body);"
        " return [s.backgroundColor, s.color]; })()"
    )
    brightness = [sum(map(int, c[4:-1].split(",")[:3])) for c in colours]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_answer_fits_one_screen(browser: Any, tmp_path: Path, scheme: str) -> None:
    """Of the committed runs: sentence, chart and the head of the table, at 1280 x 800."""
    from lantern_accel.device.datasheets import profiles_dir
    from lantern_accel_profiles.measure.reading import read_run
    from lantern_accel_profiles.report.comparison import compare
    from lantern_accel_profiles.report.points import Terms
    from lantern_accel_profiles.report.render import write

    runs = [read_run(path) for path in sorted((profiles_dir() / "measured").glob("*.json"))]
    path = tmp_path / "report.html"
    write(compare(runs, profiles=[], terms=Terms(latency_s=2.0)), path)
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(path.as_uri())
    for part in ("h1", ".desk svg", "table.first thead"):
        box = page.locator(part).first.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 800
    assert page.locator("table.first tbody tr").count() == len(runs)
    assert page.locator(".phone").first.is_hidden()
