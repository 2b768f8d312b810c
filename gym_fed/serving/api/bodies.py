"""Reading a request's JSON body, with a cap on its size before it is kept."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.api.waiting import ClientGone
from gym_fed.serving.openai.refusals import RequestError

MAX_BODY_BYTES = 8 * 2**20


async def read_json(request: Request) -> Any:
    """The parsed body.

    Raises:
        GymError: ``TOO_LARGE``; ``USAGE`` for another content type (which a form of a web page would have) or no JSON.
        ClientGone: The client went away before it was done.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"content type {kind!r} is not application/json", hint="send JSON")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect as error:
        raise ClientGone from error
    try:
        return json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON: {said}", name="invalid_json") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _too_large() -> GymError:
    return RequestError(
        f"the body is larger than {MAX_BODY_BYTES} bytes",
        code=ErrorCode.TOO_LARGE,
        hint="send less text at once",
    )
