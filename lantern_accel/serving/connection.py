"""Connections of which each request must come whole, and soon."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lantern_accel.serving.refusals import not_whole


class Connection(H11Protocol):
    """Closes a connection on which no whole request has come after ``seconds``.

    Counted from the connection, and from the first byte after an answer; uvicorn closes one that is idle.
    While a request is answered, the time of its body is the :class:`~.guard.Guard`'s.
    """

    seconds = 30.0
    _late: asyncio.TimerHandle | None = None

    @property
    def sending(self) -> bool:
        """Whether the client has a request to send, or to complete."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self, open_: bool = True) -> None:
        if self._late is not None and not (open_ and self.sending):
            self._late.cancel()
            self._late = None
        elif self._late is None and open_ and self.sending:
            self._late = self.loop.call_later(self.seconds, self._end)

    def _end(self) -> None:
        self._late = None
        if self.conn.our_state is h11.IDLE:  # no request, which an application could answer
            late = not_whole(self.seconds)
            text = json.dumps(late.body())
            head = f"HTTP/1.1 {late.status} Request Timeout\r\nContent-Type: application/json\r\n"
            head += f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n"
            self.transport.write((head + text).encode())
        if self.conn.our_state in (h11.IDLE, h11.DONE):
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn types it
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch(open_=False)

    def shutdown(self) -> None:
        """Close at the stop of the server, unless a whole request is being answered."""
        if self.sending:
            self.transport.close()
        else:
            super().shutdown()
