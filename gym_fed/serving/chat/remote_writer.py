"""Chat with a server that implements OpenAI's API, over server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, whole_number

if TYPE_CHECKING:
    import httpx


T = TypeVar("T")
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""Maximum time in seconds between two chunks, since the server may queue the request, or prefill a long prompt."""

MAX_ANSWER_BYTES = 64 << 20
"""Maximum size in bytes of a decompressed answer; the log-probabilities of 100,000 tokens take about 10 MB."""

MAX_LINE_BYTES = 4 << 20
"""Maximum size in bytes of one line of a stream; a chunk with its log-probabilities has a few kB."""

ANSWER_SECONDS = 3600.0
"""Maximum time in seconds from the first byte of an answer to the last, since a slow server might never finish."""

_CODES = {
    401: ErrorCode.UNAUTHENTICATED,
    403: ErrorCode.PERMISSION_DENIED,
    404: ErrorCode.NOT_FOUND,
    413: ErrorCode.TOO_LARGE,
    429: ErrorCode.BUSY,
}


class RemoteWriter:
    """A client of ``gym api`` or a compatible server.

    Args:
        url: The address, with or without ``/v1``.
        model: The server's name of the base, or ``base:variant``; None uses the only base that it serves.
        api_key: The API key, sent as a bearer token.

    Raises:
        GymError: ``UNAVAILABLE``, ``UNAUTHENTICATED``, or ``NOT_FOUND`` for a model that the server does not list.
    """

    remembers = True

    def __init__(self, url: str, model: str | None = None, *, api_key: str | None = None) -> None:
        import httpx

        if not url.startswith(("http://", "https://")):
            raise GymError(
                ErrorCode.USAGE, f"{url!r} is not a URL", "use one such as http://127.0.0.1:8000/v1"
            )
        root = url.rstrip("/")
        self._url = root if root.endswith("/v1") else f"{root}/v1"
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
        )
        self._names = self._listed()
        self.base = self._choose(model)

    def variants(self) -> list[str]:
        """Return the variants of the base that the server currently lists."""
        self._names = self._listed()
        before = f"{self.base}:"
        return [name.removeprefix(before) for name in self._names if name.startswith(before)]

    def write(self, url: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Stream an answer; see ``Writer``."""
        import httpx

        place = f"{self._url}{url.removeprefix('/v1')}"
        try:
            with self._client.stream("POST", place, json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    raise _refusal(place, _whole(place, answer))
                for line in _lines(place, answer):
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        yield _chunk(place, data)
                raise GymError(
                    ErrorCode.UNAVAILABLE, f"{place}: the answer was cut off", "check the server's log"
                )
        except httpx.HTTPError as error:
            raise _unreachable(place, error) from error

    def complete(self, body: dict[str, Any], endpoint: str = "completions") -> dict[str, Any]:
        """Return the first choice of a ``/v1/completions`` or ``chat/completions`` request, without streaming.

        Raises:
            GymError: The server's refusal; ``UNAVAILABLE`` for an invalid answer.
        """
        return self._fetch("POST", endpoint, lambda answer: dict(answer["choices"][0]), "an answer", body)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _listed(self) -> list[str]:
        return self._fetch(
            "GET", "models", lambda answer: [str(model["id"]) for model in answer["data"]], "a list of models"
        )

    def _fetch(
        self, method: str, path: str, pick: Callable[[Any], T], what: str, body: dict[str, Any] | None = None
    ) -> T:
        """Send a request without streaming, and return the result of ``pick`` for the JSON of its answer."""
        import httpx

        place = f"{self._url}/{path}"
        try:
            with self._client.stream(method, place, json=body) as stream:
                answer = _whole(place, stream)
        except httpx.HTTPError as error:
            raise _unreachable(place, error) from error
        if answer.status_code != 200:
            raise _refusal(place, answer)
        try:
            return pick(answer.json())
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise GymError(
                ErrorCode.UNAVAILABLE, f"{place}: not {what}", "is it an OpenAI-compatible server?"
            ) from error

    def _choose(self, model: str | None) -> str:
        # all of Ollama's models have a tag
        bases = [name for name in self._names if ":" not in name] or self._names
        if model is None and len(bases) == 1:
            return bases[0]
        if model is not None and model in self._names:
            return model
        problem = "has no default model" if model is None else f"has no model {model!r}"
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"{self._url} {problem}",
            f"available models: {', '.join(self._names[:20]) or 'none'}",
        )


def _whole(place: str, answer: httpx.Response) -> httpx.Response:
    """Read the body of an answer, up to ``MAX_ANSWER_BYTES``."""
    import httpx

    parts = list(_parts(place, answer))
    headers = {
        name: answer.headers[name] for name in ("content-type", "retry-after") if name in answer.headers
    }
    return httpx.Response(answer.status_code, headers=headers, content=b"".join(parts))


def _lines(place: str, answer: httpx.Response) -> Iterator[str]:
    """Yield the lines of a stream, each of at most ``MAX_LINE_BYTES``."""
    begun: list[bytes] = []
    num_bytes = 0
    for part in _parts(place, answer):
        begun.append(part)
        num_bytes += len(part)
        if b"\n" in part or b"\r" in part:
            # ``rest`` is the start of a line whose newline has not arrived
            *lines, rest = (b"".join(begun) + b"\0").splitlines()
            for line in lines:
                yield line.decode("utf-8", errors="replace")
            begun, num_bytes = [rest[:-1]], len(rest) - 1
        if num_bytes > MAX_LINE_BYTES:
            raise _too_much(place, f"a line of more than {MAX_LINE_BYTES} bytes")
    yield b"".join(begun).decode("utf-8", errors="replace")


def _parts(place: str, answer: httpx.Response) -> Iterator[bytes]:
    """Yield the bytes of an answer, up to ``MAX_ANSWER_BYTES`` and for ``ANSWER_SECONDS``."""
    end, num_bytes = time.monotonic() + ANSWER_SECONDS, 0
    for part in answer.iter_bytes():
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            raise _too_much(place, f"more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > end:
            raise _too_much(place, f"data that did not end within {ANSWER_SECONDS:.0f} seconds")
        yield part


def _too_much(place: str, problem: str) -> GymError:
    return GymError(
        ErrorCode.UNAVAILABLE, f"{place}: answered with {problem}", "is it an OpenAI-compatible server?"
    )


def _chunk(place: str, data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise GymError(ErrorCode.UNAVAILABLE, f"{place}: sent invalid JSON: {data[:80]!r}")
    if "error" in chunk:
        raise GymError(ErrorCode.UNAVAILABLE, f"{place}: {_error_in(chunk)[0]}")
    return chunk


# gym-fed's own codes as gym api writes them; model_not_found is OpenAI's, and less specific.
_OWN = {code.value.replace("-", "_"): code for code in ErrorCode if code is not ErrorCode.MODEL_NOT_FOUND}


def _refusal(place: str, answer: httpx.Response) -> GymError:
    try:
        message, code = _error_in(answer.json())
    except (ValueError, RecursionError):
        message, code = answer.text[:200], ""
    known = _OWN.get(code)
    if code == "context_length_exceeded":
        known = ErrorCode.TOO_LARGE
    fallback = ErrorCode.UNAVAILABLE if answer.status_code >= 500 else ErrorCode.USAGE
    hint = ""
    if answer.status_code == 401:
        hint = "store the key in an environment variable, and pass its name with --api-key-env"
    if after := answer.headers.get("retry-after"):
        seconds = whole_number(after, 9)  # it may also be an HTTP date
        hint = (
            f"try again in {counted(seconds, 'second')}"
            if seconds is not None
            else f"try again at {after[:80]}"
        )
    return GymError(
        known or _CODES.get(answer.status_code, fallback), f"{place}: {answer.status_code}: {message}", hint
    )


def _error_in(document: Any) -> tuple[str, str]:
    """Return the message and code of OpenAI's error object, if the server sends one."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, dict):
        return str(error.get("message", error)), str(error.get("code") or "")
    return str(error), ""


def _unreachable(place: str, error: httpx.HTTPError) -> GymError:
    return GymError(
        ErrorCode.UNAVAILABLE, f"{place}: {str(error) or type(error).__name__}", "is the server running?"
    )
