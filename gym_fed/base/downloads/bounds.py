"""Limit responses to huggingface_hub's client, since libraries such as ``datasets`` read them into memory.

    with_bounds()                    # once per process
    may_send("owner/name", {"train.jsonl": 9_000})

After these calls, responses for a file of that dataset are limited to the size of the file or the requested range,
and descriptions, redirects and errors to separate sizes. Other files must be limited by their callers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httpx2

from gym_fed.base.downloads.limits import (
    MAX_INFO_BYTES,
    MAX_OTHER_BYTES,
    READ_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain, readable_bytes

if TYPE_CHECKING:
    _Factory = Callable[[], httpx2.Client]

_KEY = "gym_fed_most_bytes"
_FILE = re.compile(r"(?:/.*)?/datasets/([^/]+(?:/[^/]+)?)/resolve/[^/]+/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)", re.ASCII)

_sizes: dict[str, dict[str, int]] = {}
_bounded: list[object] = []


def may_send(name: str, sizes: Mapping[str, int]) -> None:
    """Bound the responses for a dataset's files, by path, to their sizes in bytes."""
    _sizes[name.lower()] = dict(sizes)


def with_bounds() -> None:
    """Make all HTTP clients that huggingface_hub creates from now on check their responses; idempotent."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    factory: _Factory = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    if factory in _bounded:
        return

    def bounded() -> httpx2.Client:
        client = factory()  # with its proxies and certificates
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], _note_limit],
            "response": [_bound, *hooks["response"]],
        }
        return client

    _bounded.append(bounded)
    set_client_factory(bounded)


def _note_limit(request: httpx2.Request) -> None:
    """Record the limit of the first request; redirects keep it."""
    if _KEY in request.extensions:
        return
    limit: int | None = None
    path = unquote(request.url.path)
    if match := _FILE.fullmatch(path):
        sizes = _sizes.get(match[1].lower())
        if sizes is not None:
            limit = max(sizes.get(match[2], 0), MAX_OTHER_BYTES)
            byte_range = _RANGE.fullmatch(request.headers.get("Range", ""))
            if byte_range is not None:
                limit = max(0, int(byte_range[2]) + 1 - int(byte_range[1]))
            request.headers["Accept-Encoding"] = "identity"
    elif "/api/" in path:
        limit = MAX_INFO_BYTES
    request.extensions[_KEY] = limit


def _bound(response: httpx2.Response) -> None:
    limit = response.request.extensions.get(_KEY)
    if response.has_redirect_location or response.is_error:
        limit = MAX_OTHER_BYTES
    if limit is None:
        return
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity" and "/api/" not in response.url.path:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{_where(response)}: sends compressed bytes that were not requested",
            "check HF_ENDPOINT, or choose another repository",
        )
    response.stream = _Bounded(response, limit)


class _Bounded(httpx2.SyncByteStream):
    """A response body that raises if it is too long or too slow."""

    def __init__(self, response: httpx2.Response, limit: int) -> None:
        assert isinstance(response.stream, httpx2.SyncByteStream)
        self._inner, self._limit, self._where = response.stream, limit, _where(response)

    def __iter__(self) -> Iterator[bytes]:
        seen, waited, parts = 0, 0.0, iter(self._inner)
        while True:
            began = time.monotonic()
            part = next(parts, None)
            waited += time.monotonic() - began  # exclude the time that the reader spends
            if part is None:
                return
            seen += len(part)
            if seen > self._limit:
                raise GymError(
                    ErrorCode.TOO_LARGE,
                    f"{self._where}: sends more than {readable_bytes(self._limit)}",
                    "check HF_ENDPOINT, or choose another repository",
                )
            if waited > READ_SECONDS + seen / SLOWEST_BYTES_PER_SECOND:
                raise GymError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"{self._where}: sent {readable_bytes(seen)} in {waited:.0f} s",
                    "check HF_ENDPOINT, or run the same command again later",
                )
            yield part

    def close(self) -> None:
        self._inner.close()


def _where(response: httpx2.Response) -> str:
    url = response.url  # a signed URL contains secrets in its query
    return plain(f"{url.scheme}://{url.netloc.decode()}{url.path}", 200)
