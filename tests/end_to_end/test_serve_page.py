"""The server's page in a real browser: it draws while it decodes, and shows prices.

Needs the package ``playwright`` and a Chromium (``CHROMIUM=/path/to/chromium`` or one on the path).
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.server import Served, serving

from lantern_accel.serving.body import Body
from lantern_accel.serving.scheduler import ServerSettings

pytestmark = pytest.mark.browser


def opened(browser: Any, served: Served, width: int = 1280) -> tuple[Any, list[str]]:
    """Return the page, and a list of what it complains about or fetches from elsewhere."""
    page = browser.new_page(viewport={"width": width, "height": 844})
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda one: said.append(one.text) if one.type == "error" else None)

    def asked(request: Any) -> None:
        if not request.url.startswith((served.url, "data:")):
            said.append(request.url)

    page.on("request", asked)
    page.goto(served.url)
    page.wait_for_selector("#strategies label")
    return page, said


@pytest.mark.parametrize("width", [390, 1280])
def test_it_draws_strategies_side_by_side_as_they_decode(browser, tiny_model, width):
    with serving(tiny_model, ServerSettings(slots=1)) as served:
        page, said = opened(browser, served, width)
        assert "tiny, 8x8 pixels" in page.text_content("#title")
        assert page.locator("#keyed").is_hidden(), "no key is needed"
        page.click("#docs")
        page.wait_for_selector("#fields td")
        fields = page.text_content("#fields")
        assert all(name in fields for name in Body.model_fields), "the API is described"
        assert "plain decoding" in page.text_content("label:has(input[value=vanilla])")
        page.uncheck("input[value=auto]")
        page.click("#draw")
        assert page.locator("article").count() == 2, "what waits has a card"
        for name in ("vanilla", "lantern++"):
            page.wait_for_selector(f"article[data-strategy='{name}'][data-done=yes]")
        plain = page.locator("article[data-strategy=vanilla]")
        assert int(plain.get_attribute("data-partials")) >= 1  # drawn while it decoded
        assert "0, exact" in plain.text_content()
        assert "1.00" in plain.text_content()  # tokens per step
        relaxed = page.locator("article[data-strategy='lantern++']").text_content()
        assert "total variation per token (upper bound)0." in relaxed
        sizes = page.evaluate(
            "[...document.images].map((i) => [i.naturalWidth, i.naturalHeight, i.alt])"
        )
        assert sizes == [[8, 8, "the image"]] * 2
        wide = page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert wide, "the page is wider than its window"
        assert not said
        page.close()


def test_it_says_what_is_wrong_and_asks_for_a_key(browser, tiny_model):
    with serving(tiny_model, ServerSettings(slots=1, keys=("secret",))) as served:
        page = browser.new_page()
        page.goto(served.url)
        page.wait_for_selector("#keyed:not([hidden])")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#strategies label")
        page.fill("#prompt", "   x")
        page.evaluate("document.getElementById('prompt').value = '   '")
        page.click("#draw")
        page.wait_for_selector("article .error")
        assert "the prompt is empty" in page.text_content("article .error")
        page.close()
