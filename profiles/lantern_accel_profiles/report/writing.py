"""Formats figures with few digits and a unit, or the reason why there is no figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lantern_accel_profiles.measure.record import NOT_MEASURED, Interval, Reading, is_measured

MISSING = "not measured"
#: Verdicts in words, on a strategy against plain decoding.
VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "same": "the same speed",
    "ambiguous": "not shown to be faster",
}
MINUS = "\N{MINUS SIGN}"


def number(value: float, digits: int = 3) -> str:
    """Return a number in ``digits`` significant digits, thousands apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.96 in two digits is 10, not 10.0
    places = max(digits - 1 - math.floor(math.log10(abs(rounded))), 0)
    return f"{value:,.{places}f}".replace("-", MINUS)


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{number(100 * share, 2)} %" if abs(share) > 5e-7 else "0 %"


def reading(value: Reading | None) -> str:
    """Return a reading, or 'not measured'."""
    return number(value) if is_measured(value) else MISSING


def interval(value: Interval | str, unit: str = "") -> str:
    """Return a figure, and its interval if its ends differ: ``352 (340 to 361)``."""
    if not isinstance(value, Interval):
        return MISSING
    span = "" if value.low == value.high else f"({number(value.low)} to {number(value.high)})"
    return " ".join(filter(None, (number(value.value), unit, span)))


def reason(value: object) -> str:
    """Return the reason why a figure is missing, or an empty text."""
    text = str(value)
    return text.removeprefix(NOT_MEASURED) if text.startswith(NOT_MEASURED) else ""


def verdict_words(word: str) -> str:
    """Return a verdict in words, or the reason why there is none."""
    return f"no verdict: {reason(word)}" if reason(word) else VERDICTS.get(word, word)


def times(value: Interval | str) -> str:
    """Return a ratio with its interval: ``1.13x (0.91 to 1.32)``."""
    if isinstance(value, str):
        return MISSING
    if value.low == value.high:
        return f"{value.value:.2f}x"
    return f"{value.value:.2f}x ({value.low:.2f} to {value.high:.2f})"


def size(count: Reading) -> str:
    """Return bytes in binary units."""
    if not is_measured(count):
        return MISSING
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"


def as_sentence_list(words: Sequence[str]) -> str:
    """Join words for a sentence: ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def upper(text: str) -> str:
    """Return a sentence with its first letter in upper case."""
    return text[:1].upper() + text[1:]
