"""The comparison as a page, as Markdown, or as JSON; the ending of the file's name decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_accel.device.host_load import BUSY
from lantern_accel.errors import RequestError
from lantern_accel.files import check_target, json_text, write_whole
from lantern_accel_profiles.measure import samples
from lantern_accel_profiles.measure.record import PHASES, Interval, Quality
from lantern_accel_profiles.quality import interval as intervals
from lantern_accel_profiles.report import advice, writing
from lantern_accel_profiles.report.offers import IN_TIME
from lantern_accel_profiles.report.record import Comparison
from lantern_accel_profiles.report.rows import PERCENTILES
from lantern_accel_profiles.report.verdict import QUESTION, device_sentences

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

KINDS = (".html", ".md", ".json")
INSTALL = "pip install 'lantern-accel[report]'"
#: The last line before the appendix of a report in Markdown.
PICTURES = "The HTML report also has images and plots: `-o report.html`."
#: Devices that the first screen's table shows; the rest unfold.
FIRST = 6
#: Signs that are markup in Markdown, though a run's name may have them.
MARKUP = str.maketrans({"<": "&lt;", "[": "&#91;", "*": "&#42;"})
TEMPLATES = Path(__file__).parent / "templates"
MARKS = {"faster": "▲", "slower": "▼", "same": "=", "ambiguous": "○"}


def check_kind(path: Path) -> None:
    """Raise RequestError for an ending that is not a kind of report, and an unwritable path."""
    if path.suffix.lower() not in KINDS:
        raise RequestError(
            f"{path} does not say which kind of report: end it in {', '.join(KINDS)}"
        )
    check_target(path)


def write(comparison: Comparison, path: Path) -> None:
    """Write the comparison in the form that the name's ending asks for.

    Raises RequestError where the disk has no space for it, or no right to write there.
    """
    check_kind(path)
    kind = path.suffix.lower()
    if kind == ".json":
        text = json_text(comparison.model_dump(mode="json"))
    else:
        text = page(comparison) if kind == ".html" else to_markdown(comparison)
    try:
        write_whole(path, text)
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written ({error.strerror}); free some space or choose another folder"
        ) from None


def page(comparison: Comparison) -> str:
    """Return the self-contained HTML page."""
    environment = _environment(html_page=True)
    from lantern_accel_profiles.report import figures

    css = figures.palette_css() + "\n" + (TEMPLATES / "report.css").read_text(encoding="utf-8")
    return _render(environment, "report.html.j2", comparison, css=css, figures=figures)


def to_markdown(comparison: Comparison) -> str:
    """Return the Markdown text: the same tables, no plots."""
    return _render(_environment(html_page=False), "report.md.j2", comparison)


def answer(comparison: Comparison) -> str:
    """Return all between title and appendix, in Markdown: the answer, tables, quality losses."""
    text = to_markdown(comparison).partition(f"{PICTURES}\n")[0]
    return text.partition("\n")[2].strip()


def check_packages(path: Path | None) -> None:
    """Raise RequestError where a package is missing that this kind of report needs."""
    if path is None or path.suffix.lower() != ".json":
        _environment(html_page=False)
    if path is not None and path.suffix.lower() == ".html":
        from lantern_accel_profiles.report.figures import load_pyplot

        load_pyplot()


def _render(environment: Environment, template: str, comparison: Comparison, **more: object) -> str:
    text = environment.get_template(template).render(
        c=comparison,
        question=QUESTION,
        shown=FIRST,
        unrun=[gap for gap in comparison.gaps if gap.device],
        gaps=[gap for gap in comparison.gaps if not gap.device],
        pictures=PICTURES,
        protocol=_protocol(environment),
        phases=PHASES,
        marks=MARKS,
        **more,
    )
    return str(text)


def _protocol(environment: Environment) -> list[list[str]]:
    """Return how figures are made: names, each with its paragraph."""
    text = environment.get_template("protocol.j2").render(
        gain=samples.GAIN,
        most_warmups=samples.MOST_WARMUPS,
        quick_warmups=samples.QUICK_WARMUPS,
        resamples=intervals.RESAMPLES,
        same=intervals.SAME,
        busy=BUSY,
        in_time=IN_TIME,
        fewest=intervals.FEWEST,
        percentiles=[f"p{p}" for p in PERCENTILES],
    )
    return [" ".join(one.split("\n")).split(": ", 1) for one in text.strip().split("\n\n")]


def _environment(*, html_page: bool) -> Environment:
    try:
        import jinja2
    except ImportError:
        raise RequestError(f"reports need jinja2; {INSTALL}, or write .json instead") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=html_page,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=None if html_page else _escape_markup,
    )
    for name in ("headline", "notes", "offers_table", "points_table", "equal_table"):
        environment.globals[name] = getattr(advice, name)
    environment.globals.update(device_sentences=device_sentences, grouped=_group_by)
    names = "number percent reading interval reason times size verdict_words"
    environment.filters.update(
        {name: getattr(writing, name) for name in names.split()},
        coded=_mark_code,
        command=_command,
        cell=lambda text: str(text).replace("|", "\\|").replace("\n", " "),
    )
    environment.tests["interval"] = lambda value: isinstance(value, Interval)
    environment.tests["rated"] = lambda value: isinstance(value, Quality)
    environment.tests["missing"] = lambda value: bool(writing.reason(value))
    return environment


def _escape_markup(one: object) -> object:
    """Return text without what Markdown would take for markup; code and Markup as they are."""
    if type(one) is not str:
        return one
    parts = enumerate(one.split("`"))
    return "`".join(part if number % 2 else part.translate(MARKUP) for number, part in parts)


def _mark_code(text: object) -> Markup:
    """Return text for the page with what stands between backticks as code."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in str(text).split("`")]
    return Markup("").join(
        _command(part) if index % 2 else part for index, part in enumerate(parts)
    )


def _command(text: object) -> Markup:
    """Return a command as code whose words are not broken at their hyphens."""
    from markupsafe import Markup

    words = [Markup("<span>{}</span>").format(word) for word in str(text).split(" ")]
    return Markup("<code>{}</code>").format(Markup(" ").join(words))


def _group_by(
    items: Sequence[object], *names: str
) -> list[tuple[tuple[object, ...], list[object]]]:
    """Return items by the values of attributes, in the order in which they come."""
    groups: dict[tuple[object, ...], list[object]] = {}
    for item in items:
        groups.setdefault(tuple(getattr(item, name) for name in names), []).append(item)
    return list(groups.items())
