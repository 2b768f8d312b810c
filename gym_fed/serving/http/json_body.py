"""The JSON body of a request: its bytes are bounded before they are read, and its values before they are parsed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gym_fed.core.errors import ErrorCode
from gym_fed.serving.http.waiting import ClientGone
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.strict_json import strict_json

MAX_BODY_BYTES = 8 * 2**20
MAX_VALUES = 2**18
"""More than the tokens of a long context. Parsing holds Python's lock, for a time that grows with values, not bytes."""

_MOST_QUOTES = 4 * MAX_VALUES
"""Two around each name and each value."""


async def read_body(request: Request, came: Callable[[int], None] = lambda size: None) -> bytearray:
    """The bytes of the body.

    Args:
        request: Whose.
        came: Gets the size of each part, and may refuse it.

    Raises:
        GymError: ``TOO_LARGE``; ``USAGE`` for another content type, as a web form sends.
        ClientGone: The client disconnected before the end of the body.
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
        raise _too_large(f"is larger than {MAX_BODY_BYTES} bytes")
    data = bytearray()
    try:
        async for part in request.stream():
            came(len(part))
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise _too_large(f"is larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:
        raise ClientGone from error
    return data


def parse_body(data: bytearray) -> Any:
    """The value of a body; takes its time, and so is not for the event loop.

    Raises:
        GymError: ``TOO_LARGE`` for too many values; ``USAGE`` for what is not JSON.
    """
    if _has_many_values(data):
        raise _too_large(f"has more than {MAX_VALUES:,} values")
    try:
        return strict_json(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", name="invalid_json") from error


def _has_many_values(data: bytearray) -> bool:
    """By what stands between values, without that in texts."""
    if _marks(data) <= MAX_VALUES:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return plain.count(b'"') > _MOST_QUOTES or _marks(b"".join(plain.split(b'"')[::2])) > MAX_VALUES


def _marks(data: bytes | bytearray) -> int:
    return sum(map(data.count, (b"{", b"[", b",")))


def _too_large(said: str) -> RequestError:
    return RequestError(f"the body {said}", code=ErrorCode.TOO_LARGE, hint="send less at once")
