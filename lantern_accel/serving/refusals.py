"""Errors as OpenAI's clients read them: a status, and an object with all four keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import JSONResponse

from lantern_accel.errors import (
    DoesNotFitError,
    LanternError,
    RequestError,
    StrategyError,
    did_you_mean,
    show,
)

#: Tells OpenAI's clients that sending the request again would compute it again.
NO_RETRY = {"x-should-retry": "false"}

SHUTTING_DOWN = "shutting_down"


def quote(value: object, most: int = 80) -> str:
    """Return a value of a body for a message: short, and as JSON writes it."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return show(value, most)
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is an error: HTTP status, one sentence, and what OpenAI's clients look at.

    ``param``: the field that is wrong; ``code``: a name for programs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The error's ``type``."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        if self.status in kinds:
            return kinds[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def outcome(self) -> str:
        """How a request ends that gets this answer, one of :data:`~.metrics.OUTCOMES`."""
        return "refused" if self.status < 500 or self.code == SHUTTING_DOWN else "failed"

    def body(self) -> dict[str, object]:
        """Return the error object; ``param`` and ``code`` may be null, but they are there."""
        found = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": found}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body(), self.status, dict(self.headers))


def wrong_value(param: str | None, message: str, code: str = "invalid_value") -> Refusal:
    """Return the refusal of a field's value."""
    return Refusal(400, message, param, code)


def check_model(name: str, model: str) -> None:
    """Raise the refusal of a model that is not the one that is served."""
    if name != model:
        text = f"no model is named {quote(name)} here{did_you_mean(name, [model])}"
        raise Refusal(404, text, "model", "model_not_found")


def refusal_of(error: BaseException) -> Refusal:
    """Return the answer to an error: its own fault, or the server's."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestError | StrategyError | DoesNotFitError):
        return wrong_value(error.field, str(error))
    if isinstance(error, LanternError):
        return Refusal(500, str(error), code="device_failed", headers=NO_RETRY)
    text = f"the server failed ({type(error).__name__}); its log says more"
    return Refusal(500, text, code="internal_error", headers=NO_RETRY)


def not_whole(seconds: float) -> Refusal:
    """Return the refusal of a request that does not come whole; its connection is closed."""
    text = f"the request was not whole after {seconds:g} s; send all of it at once"
    return Refusal(408, text, code="request_timeout", headers={"Connection": "close"})


def server_closing() -> Refusal:
    """Return the refusal of a server that is going down."""
    text = "the server is shutting down and takes no more requests; try again later"
    return Refusal(503, text, code=SHUTTING_DOWN, headers={"Retry-After": "5"})
