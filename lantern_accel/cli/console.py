"""Lines on the terminal: coloured there, plain and whole in a pipe."""

from __future__ import annotations


def say(text: str, *, label: str = "", style: str = "", to_stderr: bool = False) -> None:
    """Print ``label: text`` as one line, never wrapped or cut, the label in ``style``."""
    # Imported here: --help needs none of it.
    from rich.console import Console
    from rich.text import Text

    line = Text(f"{label}: " if label else "", style=style)
    line.append(" ".join(text.splitlines()), style="default" if label else style)
    Console(stderr=to_stderr, highlight=False).print(line, soft_wrap=True)
