"""Options of a load: ``python -m lantern_accel_profiles.load``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lantern_accel.cli.options import option
from lantern_accel.errors import RequestError
from lantern_accel.files import check_targets
from lantern_accel_profiles import store

#: Requests that count in a level at least: of fewer, one alone would be the slowest twentieth.
LEAST = 20


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    url: str = option("Address of the service.", default="http://127.0.0.1:8000")
    serve: str | None = option("Start `lantern-accel serve` with these options.", metavar="WORDS")
    latency: float | None = option("Search for the largest load with a p95 of this.", min=1e-9)
    wait: float = option("Seconds that a search waits for other programs.", min=0, default=0.0)
    requests: int = option("Number of requests; in a search, per level.", min=1, default=200)
    concurrency: int = option("Requests at once; in a search, the most.", min=1, default=32)
    partials: int = option("Partial images per request. 0: no stream.", min=0, max=3, default=3)
    deadline: float = option("Deadline of goodput in seconds.", min=0, default=10.0)
    strategy: str | None = option("Strategy. Default: the service's choice.")
    size: str | None = option("Width and height in pixels. Default: the model's.", metavar="WxH")
    model: str | None = option("Name of the model. Default: the service's.")
    key: str | None = option("API key.")
    prompts: Path | None = option("File of prompts, as `generate --prompts` takes it.")
    retries: int = option("Retries when the service is busy.", min=0, default=30)
    timeout: float = option("Time limit of a request in seconds.", min=0, default=600.0)
    pid: int | None = option(
        "Process id of the service: its own load is not that of others (Linux)."
    )
    output: Path | None = option("JSON file of figures and samples.", "--output", "-o")

    def refuse(self) -> None:
        """Raise RequestError for what cannot be measured or written, before a service starts."""
        if self.latency is None:
            check_targets(self.output)
            return
        if self.requests < LEAST:
            raise RequestError(f"--requests {self.requests}: a p95 needs {LEAST} or more")
        if self.output is not None:
            store.check_output(self.output, resume=True)
