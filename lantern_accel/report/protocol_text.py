"""Explains in the report how its figures are made."""

from __future__ import annotations

from lantern_accel.measure.intervals import FEWEST, RESAMPLES, SAME
from lantern_accel.measure.samples import GAIN, MOST_WARMUPS, QUICK_WARMUPS
from lantern_accel.report.rows import PERCENTILES

PROTOCOL_TEXT: tuple[tuple[str, str], ...] = (
    (
        "Stopwatch",
        "The backend's own, checked before the run on work whose result the host had to receive; a "
        "stopwatch that does not wait for the device ends the run. Every sample also has the host's "
        "clock, and a file whose two clocks disagree is refused.",
    ),
    (
        "Cold start",
        "Loading, and each strategy's first decoding with its buffers, capture and compilation, are "
        "reported apart and never in a speed.",
    ),
    (
        "Warm-up",
        f"In rounds, until the best of the last two decodings is not {GAIN:.0%} faster than the best "
        f"before and no counter of the device moves; at most {MOST_WARMUPS} rounds ({QUICK_WARMUPS} in "
        "a quick run). A strategy that did not settle gets no verdict.",
    ),
    (
        "Samples",
        "Strategies take turns, each once a round, in an order that changes from round to round, so "
        "that what drifts hits all alike. A sample is a whole request, text to pixels. Raw samples "
        "are in the run's file.",
    ),
    (
        "Statistics",
        f"Medians with 95 % percentile-bootstrap intervals ({RESAMPLES} resamples, fixed seed); ratios "
        "within a run are resampled by round. Percentiles "
        f"({', '.join(f'p{p}' for p in PERCENTILES)}) are given only where enough samples lie beyond "
        "them.",
    ),
    (
        "Verdict",
        f"same: the ratio's whole interval lies within {SAME:.0%} of 1; faster or slower: the interval "
        f"excludes 1; otherwise not shown to be faster. With fewer than {FEWEST} samples there is no "
        "verdict.",
    ),
    (
        "Speed-up and conversion",
        "Speed-up is over vanilla of the same run, hence the same device; for a relaxed strategy also "
        "over exact decoding on the same tree. Step compression is image tokens per target forward, and "
        "its range over prompts is that of single requests; conversion is the part that becomes speed.",
    ),
    (
        "Price",
        "For every relaxed strategy, in the same run: the total variation that it used per token (the "
        "probability mass that relaxation moved); the share of tokens equal to exact decoding with "
        "the same tree and the same uniforms (next to the share that two unrelated exact images "
        "have); and the kernel distance of the images from vanilla's (next to the distance of two "
        "vanilla sets of other seeds), judged by a sign-flip permutation test within prompts. "
        "A relaxed speed-up without its price is not printed.",
    ),
    (
        "Projection",
        "max(operations / peak, bytes / bandwidth) + launches x their cost, for prefill and for each "
        "phase of a step, with the acceptance measured elsewhere. Shown apart, never ranked; left out "
        "where the assumed cost of a launch decides, because then it says nothing about the device.",
    ),
)
