"""Amounts of money on the command line: what a device costs to rent or to buy, and its power."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_accel.errors import RequestError, did_you_mean, shown

if TYPE_CHECKING:
    from lantern_accel_profiles.measure.record import Run
    from lantern_accel_profiles.report.terms import Terms

#: The largest amount that is believed; larger ones are typing mistakes.
MOST = 1e9
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+) ?(?P<unit>[A-Za-z]{3}|[$€£¥])")


def read_terms(
    runs: list[Run], called: list[set[str]], rent: list[str], buy: list[str], power: str | None
) -> Terms:
    """Return what devices and power cost, by the names of runs; raises RequestError."""
    from lantern_accel_profiles.report.terms import Terms

    rents, units = read_amounts("--rent", rent, runs, called)
    bought, more = read_amounts("--buy", buy, runs, called)
    if both := sorted(rents.keys() & bought.keys()):
        raise RequestError(
            f"run {both[0]!r} has both --rent and --buy; give it one of them, as NAME=AMOUNT"
        )
    per_kwh, unit = read_amount("--power", power) if power is not None else (None, None)
    units |= more | ({unit} if unit is not None else set())
    return Terms(rent=rents, buy=bought, power=per_kwh, currency=one_currency(units))


def read_amount(option: str, word: str) -> tuple[float, str]:
    """Return an amount and its currency, such as ``900EUR``; raises RequestError for anything else."""
    found = _AMOUNT.fullmatch(word.strip())
    amount = float(found["number"]) if found else math.nan
    if found is None or not 0 < amount <= MOST:
        one = ", or as NAME=900EUR for one run alone" if option != "--power" else ""
        like = "0.30EUR" if option == "--power" else "900EUR"
        raise RequestError(
            f"{option} {shown(word)} is not an amount with its currency; write it as {like}{one}"
        )
    return amount, found["unit"]


def read_amounts(
    option: str, words: Sequence[str], runs: Sequence[Run], called: Sequence[set[str]]
) -> tuple[dict[str, float], set[str]]:
    """Return amounts by a run's name, and their currencies.

    ``words``: each ``AMOUNT``, for every run without one of its own, or ``NAME=AMOUNT``; ``called``: the
    names that each run answers to. Raises RequestError for a name that no run has.
    """
    amounts: dict[str, float] = {}
    units: set[str] = set()
    for word in sorted(words, key=lambda one: "=" in one):  # those of all runs first
        name, sign, text = word.rpartition("=")
        amount, unit = read_amount(option, text if name or not sign else word)
        mine = [run for run, names in zip(runs, called, strict=True) if not name or name in names]
        if name and len(mine) != 1:
            which = "names several runs" if mine else "names no run"
            raise RequestError(
                f"{option} {shown(word)}: {shown(name)} {which}"
                f"{did_you_mean(name, sorted(set().union(*called)))}; give a run a name with NAME=FILE"
            )
        amounts |= {run.name: amount for run in mine}
        units.add(unit)
    return amounts, units


def one_currency(units: set[str]) -> str:
    """Return the currency that all amounts have; raises RequestError where there are several."""
    if len(units) > 1:
        listed = " and ".join(sorted(units))
        raise RequestError(f"amounts are in {listed}; write all of them in one currency")
    return "".join(units)
