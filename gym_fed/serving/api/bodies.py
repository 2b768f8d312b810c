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
    kind, _, more = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json":
        raise RequestError(f"content type {kind!r} is not application/json", hint="send JSON")
    charset = more.strip().lower().replace('"', "")
    if charset not in ("", "charset=utf-8", "charset=utf8"):
        raise RequestError(f"content type with {charset!r} is not supported: JSON is UTF-8")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(f"content encoding {encoding!r} is not supported", hint="send it as it is")
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
        return json.loads(data, parse_constant=_no_number, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON: {said}", name="invalid_json") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One of two values would be ignored."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice in one object")
        found[name] = value
    return found


def _too_large() -> GymError:
    return RequestError(
        f"the body is larger than {MAX_BODY_BYTES} bytes",
        code=ErrorCode.TOO_LARGE,
        hint="send less text at once",
    )
