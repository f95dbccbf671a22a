"""Rows that papers published, as data with sources; quality where we have seen the table itself.

They stand next to measured rows as a yardstick of ratios. Another model, card, code or protocol gives
other values, so nothing is subtracted from them.
"""

from __future__ import annotations

from lantern_accel.evaluation.schema import PublishedRow

_PAC = "KangJialiang/SJD-PAC, README.md (arXiv 2603.18599)"
_LANTERN = "arXiv 2410.03355, MS-COCO captions, sampling"


def _pac(
    method: str,
    compression: float,
    speedup: float,
    fid: float,
    clip: float,
    *,
    exact: bool = True,
    drafter: bool = False,
) -> PublishedRow:
    return PublishedRow(
        method=method,
        model="Lumina-mGPT 7B 768",
        source=_PAC,
        exact=exact,
        drafter=drafter,
        speedup=speedup,
        tokens_per_step=compression,
        metrics={"fid": fid, "clip": clip},
        note="protocol sjd",
    )


COCO = (
    PublishedRow(
        method="EAGLE-2",
        model="LlamaGen-XL stage I",
        source=_LANTERN,
        exact=True,
        drafter=True,
        hardware="RTX 3090",
        speedup=0.93,
        note="greedy: 1.29x; the quality of this table was not at hand",
    ),
    PublishedRow(
        method="LANTERN",
        model="LlamaGen-XL stage I",
        source=_LANTERN,
        exact=False,
        drafter=True,
        hardware="RTX 3090",
        speedup=1.69,
        note="greedy: 2.26x; the quality of this table was not at hand",
    ),
    PublishedRow(
        method="LANTERN++ (best)",
        model="LlamaGen-XL",
        source="arXiv 2502.06352",
        exact=False,
        drafter=True,
        speedup=2.56,
        tokens_per_step=3.63,
        note="the quality of this table was not at hand",
    ),
    _pac("autoregressive", 1.00, 1.00, 30.79, 31.31),
    _pac("EAGLE", 2.94, 2.10, 30.68, 31.73, drafter=True),
    _pac("SJD", 2.22, 2.05, 31.13, 31.33),
    _pac("LANTERN++", 3.19, 2.28, 29.96, 30.11, exact=False, drafter=True),
    _pac("GSD", 3.39, 3.62, 33.12, 31.25, exact=False),
    _pac("SJD2", 4.02, 2.81, 31.40, 31.80, exact=False, drafter=True),
    _pac("SJD-PAC", 4.51, 3.80, 30.69, 31.21),
)


def published_rows(suite: str) -> list[PublishedRow]:
    """Return what was published for a suite; nothing where we know of no table."""
    return list(COCO) if suite == "coco" else []
