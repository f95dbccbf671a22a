"""List the private words in what users read: pages, help, messages, docstrings, comments, templates.

    python tools/words.py [PATH...]

``words.txt`` has the term for each. Identifiers, strings of one word, and code in backticks are left out.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = "lantern_accel profiles/lantern_accel_profiles backends docs README.md CONTRIBUTING.md"
PATHS = [ROOT / name for name in NAMES.split()]
LINES = (ROOT / "tools" / "words.txt").read_text(encoding="utf-8").splitlines()
TABLE = [line.replace(" ", r"\s+").split(r"\s+->\s+") for line in LINES if line[:1] != "#"]
STAYS = "|".join(word for word, why in TABLE if why.startswith("stays:"))
CODE = r"```.*?```|``[^`]*``|`[^`]*`|\{[{%].*?[}%]\}|<(script|style).*?</\1>|<[^>]*>"
KEPT = re.compile(f"{CODE}|{STAYS}", re.S | re.I)
TERMS = {word: term.replace(r"\s+", " ") for word, term in TABLE if not term.startswith("stays:")}
ANY = re.compile(rf"\b(?:{'|'.join(TERMS)})\b", re.I)


def find_words(path: Path) -> Iterator[str]:
    """Go through the words that a file has, with their places and terms."""
    whole = path.read_text(encoding="utf-8")
    texts = [(1, whole)]
    if path.suffix == ".py":
        nodes = (one for one in ast.walk(ast.parse(whole)) if isinstance(one, ast.Constant))
        texts = [(o.lineno, o.value) for o in nodes if isinstance(o.value, str) and " " in o.value]
        texts.append((1, re.sub(r"(?m)^.*?(#:? |$)", "", whole)))  # comments, each on its line
    for first, text in texts:
        prose = KEPT.sub(lambda code: "\n" * code[0].count("\n") + "-", text)
        for one in ANY.finditer(prose) if ANY.search(text) else ():
            term = next((t for word, t in TERMS.items() if re.match(word, one[0], re.I)), "")
            yield f"{path}:{first + prose[: one.start()].count(chr(10))}: {one[0]} -> {term}"


if __name__ == "__main__":
    every = (file for path in map(Path, sys.argv[1:] or PATHS) for file in (path, *path.rglob("*")))
    kinds = (".py", ".md", ".html", ".j2")
    lines = [line for file in sorted(every) if file.suffix in kinds for line in find_words(file)]
    sys.exit("\n".join(lines) or 0)
