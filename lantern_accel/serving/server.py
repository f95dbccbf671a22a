"""Running the application with uvicorn: one process, one device, and a stop that finishes what runs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from lantern_accel.serving.studio import Studio


class Server(uvicorn.Server):
    """Stops in order: what waits is refused at once, what runs is finished and answered."""

    def __init__(self, app: FastAPI, *, grace: float, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level="info",
                access_log=False,
                timeout_graceful_shutdown=max(1, round(grace)),
                server_header=False,
            )
        )
        self._studio: Studio = app.state.studio

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what waits before waiting for what runs."""
        self._studio.drain()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; a second Ctrl-C does not wait for what runs.

        uvicorn would raise the signal again once all is answered, and the device would not be closed.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    @property
    def ports(self) -> Sequence[int]:
        """The ports it listens on, once it has started."""
        return [s.getsockname()[1] for server in self.servers for s in server.sockets]
