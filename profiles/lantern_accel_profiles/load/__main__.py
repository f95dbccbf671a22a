"""``python -m lantern_accel_profiles.load`` measures an image service under load."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("error: httpx is not installed; pip install 'lantern-accel[serve]'")
import typer

from lantern_accel.cli import run
from lantern_accel.cli.console import note, say
from lantern_accel.cli.help import tidy
from lantern_accel.cli.options import with_options
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json
from lantern_accel.generation.built_in_prompts import REPORTING
from lantern_accel.prompts import read_prompts
from lantern_accel_profiles.load import service
from lantern_accel_profiles.load.levels import COMMAND, keep_up, seek
from lantern_accel_profiles.load.options import Options
from lantern_accel_profiles.measure.environment import wait_for_quiet

PROMPTS = ("red heart", "dog face", "pizza", "sunflower", "fish", "star", "ghost", "strawberry")
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
@with_options
def load(given: Options) -> None:
    """Measure a service of OpenAI's images API under load.

    --concurrency clients ask again as soon as they are answered, until --requests have ended. The figures
    include the time to the first partial image, goodput under a deadline, and joules per image with the
    meter's name (null without a meter). The output file has all samples.

    --latency searches by bisection for the largest number of requests at once whose p95 is within these
    seconds. Its output is a run for `lantern-accel compare`. The same command continues an interrupted
    search. A load works with any server of the API; a search needs a service of lantern-accel.
    """
    given.refuse()
    prompts = PROMPTS if given.latency is None else REPORTING
    if given.prompts is not None:
        prompts = tuple(str(one) for one in read_prompts(given.prompts))
    # asyncio ends all its tasks at an interrupt, and at no other signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as ending:
        if given.latency is not None:
            wait_for_quiet(given.wait, say)
        started = 0.0
        if given.serve is not None:
            made = service.run_service(given.serve, 2 * given.concurrency)
            url, pid, started = ending.enter_context(made)
            given = replace(given, url=url, pid=pid)
        try:
            httpx.get(given.url)
            if given.latency is not None:
                return asyncio.run(seek(given, prompts, started, say))
            found = asyncio.run(keep_up(given, prompts, say))
        except (httpx.HTTPError, httpx.InvalidURL):
            way = "start `lantern-accel serve`, or name the address with --url"
            raise RequestError(f"no service answers at {given.url!r}; {way}") from None
        except KeyboardInterrupt:
            note("interrupted; the same command continues a search with the levels of its file")
            raise typer.Exit(130) from None
    if given.output is not None:
        write_json(given.output, found)
    if found["outcomes"] != {"ok": given.requests}:
        raise typer.Exit(1)


tidy(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load, or the search; 1 where a request of a load got no image."""
    return run(app, argv, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
