"""Says what keeps a run from being published: figures that nobody could check are not quoted."""

from __future__ import annotations

import re
import statistics

from lantern_accel.measure.record import Run, is_measured
from lantern_accel.quality.interval import FEWEST
from lantern_accel.report.writing import percent

#: Others' share of the host's cores above which a run is called disturbed.
DISTURBED = 0.1


def disturbance(run: Run) -> float | None:
    """Return the largest median share of the host that others used during a cell; None: not known."""
    shares = []
    for cell in run.cells:
        known = [s.others_cpu for s in cell.samples if is_measured(s.others_cpu)]
        if known:
            shares.append(statistics.median(known))
    return max(shares, default=None)


def unpublishable(run: Run) -> list[str]:
    """Return why a run is not for publication, in a few words each; nothing: it is.

    Raw samples, the window of time in which they were taken and the readings of a meter are what
    somebody else needs to check a figure.
    """
    found = []
    samples = [s for cell in run.cells for s in cell.samples]
    if run.state != "complete":
        found.append(f"the run is {run.state}")
    fewest = min((len(cell.samples) for cell in run.cells), default=0)
    if fewest < FEWEST:
        found.append(f"{fewest or 'no'} raw samples of a strategy, {FEWEST} are the least")
    # A session that was killed has no end; its samples say when they were taken.
    if (
        not run.sessions
        or not all(one.started for one in run.sessions)
        or not run.sessions[-1].ended
    ):
        found.append("when it was measured is not known")
    if not any(s.energy_mj is not None for s in samples):
        found.append("no energy meter was read")
    if not re.fullmatch(r"[0-9a-f]{7,64}", run.environment.commit):
        found.append("the commit is not known")
    elif run.environment.dirty is not False:
        found.append("the code had changes that are in no commit")
    shared = disturbance(run)
    if shared is None and samples:
        found.append("what else ran on the host is not known")
    elif shared is not None and shared > DISTURBED:
        found.append(f"other programs used up to {percent(shared)} of the host")
    return found
