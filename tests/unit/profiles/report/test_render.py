"""The page carries everything it shows; Markdown and JSON say the same."""

from __future__ import annotations

import builtins
import errno
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.runs import invented_run

from lantern_accel.cli import main
from lantern_accel.device.datasheets import profiles_dir
from lantern_accel.errors import RequestError
from lantern_accel_profiles.measure.reading import read_run
from lantern_accel_profiles.measure.record import Interval, Run
from lantern_accel_profiles.report import render
from lantern_accel_profiles.report.comparison import compare
from lantern_accel_profiles.report.points import Terms
from lantern_accel_profiles.report.record import Comparison
from lantern_accel_profiles.report.writing import interval, number, size

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """Collects every address that a page would fetch, and checks that elements close."""

    EMPTY = frozenset({"meta", "link", "img", "br", "path", "use", "rect", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "srcset") and value:
                self.addresses.append(value)
            if name == "style" and value:
                self.addresses += re.findall(r"url\(([^)]*)\)", value)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


@pytest.fixture(scope="module")
def made() -> tuple[str, Comparison]:
    runs = [
        invented_run("one", batches=(1, 4)),
        invented_run("two <b>& | rule", device="Slate 9", speed=900),
    ]
    comparison = compare(runs)
    return render.page(comparison), comparison


def test_the_answer_is_printed_without_title_and_appendix(made: tuple[str, Comparison]) -> None:
    told = render.answer(made[1])
    assert not told.startswith("#") and "| Device | Strategy |" in told
    assert "Appendix" not in told and render.PICTURES not in told


def test_the_page_fetches_nothing(made: tuple[str, Comparison]) -> None:
    page = Page()
    page.feed(made[0])
    assert page.open == []
    assert "script" not in page.tags
    outside = [a for a in page.addresses if not a.startswith(("#", "data:"))]
    assert outside == []
    assert not re.search(r"@import|https?://", made[0].replace("http://www.w3.org", ""))


def test_the_page_is_made_for_phones_and_for_the_dark(made: tuple[str, Comparison]) -> None:
    html = made[0]
    assert 'name="viewport" content="width=device-width' in html
    assert "@media screen and (prefers-color-scheme: dark)" in html and html.count("--s-0:") == 2
    assert "max-width: 760px" in html
    # Every drawn colour is the page's.
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.S))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#000000"}
    assert "var(--ink)" in drawn
    assert "DejaVu" not in drawn


def test_every_part_that_a_reader_needs_is_there(made: tuple[str, Comparison]) -> None:
    html = made[0]
    for part in ("answer", "drafting", "pictures", "appendix", "efficiency", "gaps", "runs"):
        assert f'id="{part}"' in html, part
    for title in ("Speed and fidelity", "Where the time goes", "TV per token", "Image distance"):
        assert title in html, title
    text = re.sub(r"</?span>", "", html)
    for device, name in (("hpu", "gaudi2"), ("cuda", "rtx3090")):
        assert f"lantern-accel profile --device {device} --model tiny -o {name}.json" in text
    assert re.search(r"copy [\d.]{1,5} GB/s", html)


def test_names_are_text_and_not_markup(made: tuple[str, Comparison]) -> None:
    assert "two <b>&" not in made[0] and "two &lt;b&gt;&amp;" in made[0]
    runs = [invented_run("<script>*a*[b](c)"), invented_run("other")]
    runs[0].command = "lantern-accel bench --drafts '[0]*'"
    text = render.to_markdown(compare(runs, profiles=[]))
    assert "`lantern-accel bench --drafts '[0]*'`" in text
    text = re.sub("`[^`]*`", "", text)
    assert "<script>" not in text and "*a*" not in text and "[b]" not in text
    assert "&lt;script>&#42;a&#42;&#91;b](c)" in text


def test_an_unpriced_speedup_is_printed_nowhere() -> None:
    run = invented_run("bare", names=["vanilla", "lantern++"], state="interrupted", quality=[])
    comparison = compare([run], profiles=[])
    html, text = render.page(comparison), render.to_markdown(comparison)
    assert "not shown: fidelity unknown" in html
    for report in (html, text):
        assert not re.search(r"\d\.\d\dx", report)
    row = next(line for line in text.splitlines() if "3 drafts, 2 deep" in line)
    assert row.split("|")[10].strip() == "not measured"


def test_the_answer_is_the_first_line_and_one_table() -> None:
    run = read_run(profiles_dir() / "measured" / "cpu-lantern-emoji.json")
    lines = render.to_markdown(compare([run], profiles=[])).splitlines()
    assert lines[2].startswith("**AMD EPYC makes ") and len(lines[2]) < 200
    assert lines[4].startswith("| Device | Strategy | Images/s | Seconds per request |")
    assert "| 2 cores, 24 GiB, " in lines[6] and lines[7] == ""


def test_nothing_is_said_twice_of_devices_without_a_run(made: tuple[str, Comparison]) -> None:
    text = render.to_markdown(made[1])
    assert text.count("no run is among the files") == len(
        {gap.reason for gap in made[1].gaps if gap.device}
    )


def test_markdown_tables_are_whole(made: tuple[str, Comparison]) -> None:
    text = render.to_markdown(made[1])
    width = 0
    for line in text.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            width = width or cells
            assert cells == width, line
        else:
            width = 0
    assert "## Not measured" in text
    assert "two &lt;b>& \\| rule" in text


def test_the_ending_decides(tmp_path: Path, made: tuple[str, Comparison]) -> None:
    runs = [invented_run("one")]
    comparison = compare(runs)
    for name in ("a.html", "a.md", "a.json"):
        render.write(comparison, tmp_path / name)
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.md").read_text().startswith("# ")
    assert Comparison.model_validate(json.loads((tmp_path / "a.json").read_text())) == comparison
    (tmp_path / "folder.md").mkdir()
    for name, fragment in (
        ("a.pdf", ".html, .md, .json"),
        ("folder.md", "is a folder"),
        ("a.md/b.html", "cannot be written"),
        ("a.md/b.json", "cannot be written"),
    ):
        with pytest.raises(RequestError, match=re.escape(fragment)):
            render.write(comparison, tmp_path / name)


@pytest.mark.parametrize("name", ["r.md", "r.json"])
def test_a_full_disk_leaves_no_report_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lantern_accel.files.os.fsync", full)
    run = invented_run(names=["vanilla"])
    with pytest.raises(RequestError, match=r"cannot be written \(No space left on device\)"):
        render.write(compare([run], profiles=[]), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(missing: str):  # type: ignore[no-untyped-def]
        def importing(name: str, *args: object, **kwargs: object) -> object:
            if name.split(".")[0] == missing:
                raise ImportError(name)
            return real(name, *args, **kwargs)  # type: ignore[arg-type]

        return importing

    run = invented_run(names=["vanilla"])
    comparison = compare([run], profiles=[])
    for missing in ("jinja2", "matplotlib"):
        monkeypatch.setattr(builtins, "__import__", without(missing))
        with pytest.raises(RequestError, match=r"pip install 'lantern-accel\[report\]'"):
            render.page(comparison)
        # The command says so before it reads a file.
        assert main(["compare", "gone.json", "-o", "report.html"]) == 2
        assert "pip install 'lantern-accel[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9.996, "10.0"),
        (352.4, "352"),
        (0.01234, "0.0123"),
        (1234567, "1,234,567"),
        (-2.5, "\N{MINUS SIGN}2.50"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_figures_have_their_intervals() -> None:
    assert interval(Interval(value=352, low=340, high=361, n=9)) == "352 (340 to 361)"
    assert interval(Interval(value=1, low=1, high=1, n=9)) == "1.00"
    assert interval("not measured: x") == "not measured"
    assert size(5_242_880) == "5.00 MiB"


# --- plots --------------------------------------------------------------------------------------


def curve_of(*runs: Run, **terms: Any) -> str:
    from lantern_accel_profiles.report.figures import figures

    found = compare(runs, profiles=[], terms=Terms(**terms))
    wide, narrow = figures(found.models[0], found.terms.latency_s)
    assert wide.count("</text>") >= narrow.count("</text>")
    return wide


def test_the_curve_names_its_front_and_draws_the_bound() -> None:
    from lantern_accel_profiles.report.figures import glyphs

    svg = curve_of(invented_run("a", batches=(1, 4)), invented_run("b", batches=(1, 4), speed=900))
    assert svg.count(">eagle, batch 4</text>") >= 1
    assert ">2 s</text>" not in svg
    assert ">vanilla, batch 1</text>" not in svg  # eagle is faster, sooner and as exact
    alone = curve_of(invented_run("a"), latency_s=2.0)
    role, _ = glyphs(["a"])["a"]
    assert ">2 s</text>" in alone and f"var(--{role})" in alone


@pytest.mark.parametrize("count", [1, pytest.param(30, marks=pytest.mark.long)])
def test_views_take_one_run_and_thirty(count: int) -> None:
    runs = [
        invented_run(f"device {i}", names=["vanilla", "eagle"], speed=100.0 + 20 * i,
                     device=f"Abacus {i}", contact_sheet=[])
        for i in range(count)
    ]  # fmt: skip
    html = render.page(compare(runs, profiles=[]))
    wide = html[html.index('<div class="desk">') : html.index('<div class="phone">')]
    assert 1 <= len(re.findall(r">(?:vanilla|eagle), batch 1</text>", wide)) <= 12
    page = Page()
    page.feed(html)
    assert page.open == []
    assert ("More devices: 24" in html) == (count == 30)
