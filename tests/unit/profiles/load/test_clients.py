"""What a client makes of each answer of a service."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("httpx")
import httpx

from lantern_accel_profiles.load.clients import AnswerError, Clients
from lantern_accel_profiles.load.options import Options

BUSY = httpx.Response(429, json={"error": {"message": "full"}}, headers={"Retry-After": "0"})
WRONG = httpx.Response(400, json={"error": {"message": "no such size"}})
GOOD = httpx.Response(200, json={"data": [{"b64_json": "a"}], "statistics": {"tokens": 9}})


@pytest.mark.parametrize(
    ("answers", "outcome", "tokens", "status"),
    [
        ([GOOD], "ok", 9, None),
        ([BUSY, BUSY, GOOD], "ok", 9, None),
        ([BUSY, BUSY, BUSY, GOOD], "busy", None, 429),
        ([WRONG, GOOD], "failed", None, 400),
    ],
)
def test_a_busy_service_is_asked_again_and_no_other(
    answers: list[httpx.Response], outcome: str, tokens: int | None, status: int | None
) -> None:
    left = list(answers)

    async def ask() -> None:
        clients = Clients(Options(partials=0, retries=2))
        transport = httpx.MockTransport(lambda request: left.pop(0))
        clients.http = httpx.AsyncClient(transport=transport, base_url="http://x")
        sample, why = await clients.request("red heart", 0, counted=True)
        assert (sample.outcome, sample.tokens, sample.counted) == (outcome, tokens, True)
        assert status == (why.status if isinstance(why, AnswerError) else why)

    asyncio.run(ask())
    assert len(left) == (1 if status else 0)
