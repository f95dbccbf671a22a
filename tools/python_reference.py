"""The pages of the Python reference: which modules mkdocstrings shows, in which order.

``tools/docs_site.py`` adds the pages to the site. Nothing is imported, so no device's software is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from interface_table import lines as interface_lines

#: Every page: its title, its opening, and its sections, each with a file below ``lantern_accel``.
PAGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "api": (
        "Python API",
        "`import lantern_accel` loads neither torch nor a vendor's SDK; both are loaded when they are "
        'first needed.\n`lantern_accel.generate("red heart", seed=7).images[0]` is an image; '
        "`lantern_accel.load` keeps a model for more.",
        {
            "Functions": "api.py",
            "A loaded model": "generation/pipeline.py",
            "What a request takes": "generation/settings.py",
        },
    ),
    "values": (
        "Strategies and results",
        "A strategy, the sampling settings and a result are values: they can be compared, printed, and "
        "written as JSON.\n[Strategies](../strategies.md) explains what they mean, and [exit "
        "codes](../troubleshooting.md#exit-codes) what errors become on the command line.",
        {
            "Strategies": "strategy/values.py", "Sampling": "strategy/sampling.py",
            "Draft sources": "strategy/sources.py", "A draft source in a step": "decoding/drafts.py",
            "Results": "generation/result.py", "Errors": "errors.py",
        },
    ),
    "device": (
        "The backend interface",
        "Everything on this page is exported by `lantern_accel.device`. [Port an "
        "accelerator](../porting.md) is the tutorial.",
        {
            "The specification": "device/spec.py", "The device": "device/backend.py",
            "Preferences": "device/preferences.py", "How a step runs": "device/capture.py",
            "The operations": "device/operations.py",
            "Guidance, filters and sampling": "device/sampling.py",
            "Packed weights": "device/packed.py", "The cache": "device/kv_cache.py",
            "The plan of a step": "device/plan.py",
        },
    ),
    "testing": (
        "Checking a backend",
        "`lantern-accel conform NAME` runs the kit; from Python it is `lantern_accel.testing.conform`.\n"
        "[Port an accelerator](../porting.md) explains the groups of checks.",
        {"Running checks": "testing/kit.py", "What a check says": "testing/result.py"},
    ),
}  # fmt: skip
#: Of these files a page shows only these names; of others all that are public.
NAMES = {
    "api.py": ("generate", "load"),
    "generation/pipeline.py": ("Pipeline",),
    "generation/settings.py": ("Settings",),
}


def pages() -> dict[str, str]:
    """Return every page by the name of its file below ``reference``."""
    return {f"{name}.md": "\n".join(_page(name)) + "\n" for name in PAGES}


def _page(name: str) -> Iterator[str]:
    title, opening, sections = PAGES[name]
    yield from (f"# {title}", "", opening)
    if name == "device":
        yield from interface_lines()
    for heading, file in sections.items():
        module = f"lantern_accel.{file.removesuffix('.py').replace('/', '.')}"
        yield from ("", f"## {heading}", "", f"`lantern_accel/{file}`", "", f"::: {module}")
        if shown := NAMES.get(file):
            yield from ("    options:", f"      members: [{', '.join(shown)}]")
