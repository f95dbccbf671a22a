"""``lantern-accel serve``: an image service with OpenAI's images API."""

from __future__ import annotations

import errno
import importlib.util
import re
import socket
from pathlib import Path
from typing import Any

import typer

from lantern_accel.bounds import MOST_BATCH, MOST_SECONDS
from lantern_accel.cli.console import say, warn
from lantern_accel.cli.options import LoadingParts, strategy_words, with_options
from lantern_accel.errors import RequestError, show
from lantern_accel.serving.keys import KEYS, read_keys


@with_options
def serve(
    *,
    host: str = typer.Option("127.0.0.1", help="Address to listen on. 0.0.0.0: all networks."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on. 0: any free port."),
    load: LoadingParts,
    slots: int = typer.Option(
        None,
        min=1,
        max=MOST_BATCH,
        help="Batch size. Default: 4 or more, by the device's preference and memory.",
    ),
    queue: int = typer.Option(
        64, min=1, max=100_000, help="Images that may wait. Further requests get status 429."
    ),
    deadline: float = typer.Option(
        300.0, min=1, max=MOST_SECONDS, help="Time limit of a request in seconds."
    ),
    grace: float = typer.Option(
        300.0,
        min=1,
        max=MOST_SECONDS,
        help="Seconds that a stop (Ctrl-C, SIGTERM) waits for unfinished images.",
    ),
    api_keys: Path = typer.Option(
        None,
        "--api-keys",
        metavar="FILE",
        help=f"File of API keys, one per line. The variable {KEYS} adds keys, separated by commas.",
    ),
    cors: list[str] = typer.Option(
        [],
        metavar="ORIGIN",
        help="Allowed CORS origin, such as https://example.org. * allows all. Repeatable.",
    ),
    root_path: str = typer.Option(
        "", metavar="PATH", help="Path prefix of a reverse proxy, such as /images."
    ),
    strategy: list[str] = typer.Option(
        [],
        "--warm-up",
        metavar="STRATEGY",
        help="Compile this strategy's steps before the first request. Repeatable.",
    ),
) -> None:
    """Serve one model on one device through OpenAI's images API, with a page at /.

    Example: lantern-accel serve --port 8000
    """
    for needed in ("fastapi", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(needed) is None:
            raise RequestError(
                f"serving needs {needed}, which is not installed; pip install 'lantern-accel[serve]'"
            )
    keys = read_keys(api_keys)
    strategy = strategy_words(strategy) if strategy else []
    given: dict[str, Any] = {
        "queue": queue,
        "deadline": deadline,
        "grace": grace,
        "keys": keys,
        "origins": tuple(map(_origin, cors)),
        "root_path": _root_path(root_path),
    }
    _check_address(host, port)
    with load.open() as pipeline:
        from lantern_accel.serving.app import Server, make_app
        from lantern_accel.serving.scheduler import ServerSettings, usual_slots

        settings = ServerSettings(slots or usual_slots(pipeline), **given)
        app = make_app(pipeline, settings)
        if strategy:
            app.state.scheduler.warm_up(strategy)
        facts = pipeline.backend.facts()
        say(
            f"{pipeline.model.manifest.name} on {pipeline.backend.device} ({facts.name}), "
            f"{settings.slots} at a time, at http://{host}:{port}/",
            label="serving",
            style="bold green",
            to_stderr=True,
        )
        if not keys and host not in ("127.0.0.1", "localhost", "::1"):
            warn(f"anybody who reaches {host} can use it; --api-keys FILE requires a key", "open")
        Server(app, grace=grace, host=host, port=port).run()


def _origin(text: str) -> str:
    """Return an origin as browsers send it; raises RequestError for what is none."""
    found = text.strip().rstrip("/").lower()
    if found != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", found):
        raise RequestError(
            f"--cors takes an origin, which is a scheme and a host such as https://example.org, or *; "
            f"not {show(text)}"
        )
    return found


def _root_path(text: str) -> str:
    """Return a path with a slash before it and none behind; raises RequestError for what is none."""
    found = text.strip().strip("/")
    if re.search(r"[\s?#%]|:/", found):
        raise RequestError(f"--root-path takes a path such as /images, not {show(text)}")
    return f"/{found}" if found else ""


def _check_address(host: str, port: int) -> None:
    """Raise RequestError for an address that cannot be listened on, before a model is loaded."""
    reasons = {
        errno.EADDRINUSE: "is in use; stop what listens there, or name another with --port",
        errno.EACCES: "may not be used by you; name one from 1024 on with --port",
    }
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        socket.create_server(address, family=family).close()
    except (OSError, UnicodeError) as error:
        reason = reasons.get(getattr(error, "errno", None) or 0)
        other = f"{host} is not an address of this machine; name one with --host, such as 127.0.0.1"
        raise RequestError(f"port {port} of {host} {reason}" if reason else other) from None
