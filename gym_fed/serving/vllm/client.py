"""An HTTP client for a vLLM server, over a Unix socket or a URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.serving.vllm.bodies import AnswerChunk, read_chunk
from gym_fed.serving.vllm_plugin.uploads import PREFIX

_CONNECT_SECONDS = 10.0
_SHORT_SECONDS = 30.0
_MAX_SHOWN = 300
_MAX_BYTES = 1 << 20
"""Maximum size in bytes of an event, or of an answer without tokens."""
_MAX_TOKEN_BYTES = 4096
"""Maximum number of bytes per token of an answer, with the log-probabilities of other tokens."""
_UNKNOWN_FORM = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors raised when JSON does not have vLLM's form."""

T = TypeVar("T")


@dataclass(frozen=True)
class VllmAddress:
    """The address of a vLLM server.

    Attributes:
        url: The URL; with a socket, only its path is used.
        socket: The Unix socket; None for TCP.
        key: The API key; empty for none.
    """

    url: str
    socket: Path | None
    key: str


class NotConnectedError(Exception):
    """Raised for a request that never reached vLLM and may be sent again."""


class VllmClient:
    """Sends requests to one vLLM server, on one event loop."""

    def __init__(self, address: VllmAddress) -> None:
        headers = {"Authorization": f"Bearer {address.key}"} if address.key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        socket = None if address.socket is None else str(address.socket)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket, limits=limits),
            base_url=address.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            trust_env=False,
        )

    async def is_healthy(self) -> bool:
        """Return True if vLLM replies that its engine is running."""
        try:
            async with self._http.stream("GET", "/health", timeout=_SHORT_SECONDS) as answer:
                return answer.status_code == 200
        except httpx.RequestError:
            return False

    async def version(self) -> str:
        """Return vLLM's version, such as ``0.32.0+cpu``.

        Raises:
            GymError: ``UNAVAILABLE``; ``PROTOCOL_MISMATCH`` if this is not vLLM.
        """
        return plain((await self._get("/version", lambda answer: answer["version"])), _MAX_SHOWN)

    async def models(self) -> dict[str, int]:
        """Return the context length of every base model by its name.

        Raises:
            GymError: See ``version``; ``UNAUTHENTICATED`` for a wrong key.
        """

        def read(answer: Any) -> dict[str, int]:
            return {m["id"]: int(m["max_model_len"]) for m in answer["data"] if m.get("parent") is None}

        return await self._get("/v1/models", read)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[AnswerChunk]:
        """Stream an answer; closing the iterator cancels it in vLLM.

        Raises:
            NotConnectedError: If vLLM cannot be reached.
            GymError: ``UNAVAILABLE`` if vLLM stops; ``USAGE`` or ``MODEL_INVALID``, with vLLM's message, if it refuses
                the request or the variant.
        """
        with _named_failures():
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, await _body(answer, _MAX_BYTES))
                async for line in _lines(answer):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield read_chunk(json.loads(line[6:]))

    async def complete(self, body: dict[str, Any]) -> AnswerChunk:
        """Return a complete answer.

        Args:
            body: The result of ``completion_body`` with ``stream=False``.

        Raises:
            NotConnectedError: See ``generate``, also for other errors.
        """
        with _named_failures():
            most = _MAX_BYTES + _MAX_TOKEN_BYTES * int(body["max_tokens"])
            status, content = await self._send("POST", "/v1/completions", most, json=body)
            if status != 200:
                raise _refusal(status, content)
            return read_chunk(json.loads(content))

    async def load_adapter(self, name: str, content: bytes) -> None:
        """Send an adapter to the plug-in's ``uploads.AdapterUploads``, and load it.

        Args:
            name: The name to load it as, in lower-case letters, digits and dashes.
            content: A safetensors file with the adapter's config in its metadata.

        Raises:
            NotConnectedError: See ``generate``, also for other errors.
            GymError: ``PROTOCOL_MISMATCH`` if vLLM runs without the plug-in's uploads or without LoRA.
        """
        with _named_failures():
            stored = self._loaded(*await self._send("PUT", PREFIX + name, content=content))
            body = {"lora_name": name, "lora_path": json.loads(stored)["path"]}
            self._loaded(*await self._send("POST", "/v1/load_lora_adapter", json=body))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, and delete its files; a missing one has no effect.

        Raises:
            NotConnectedError: See ``generate``; also ``GymError`` ``UNAVAILABLE`` if vLLM stops.
        """
        with _named_failures():
            await self._send("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
            await self._send("DELETE", PREFIX + name)

    def _loaded(self, status: int, content: bytes) -> bytes:
        """Check the status of a response about an adapter, and return its body."""
        if status == 404:
            raise GymError(
                ErrorCode.PROTOCOL_MISMATCH,
                f"vLLM at {self._http.base_url} does not accept adapters",
                "start it with gym-fed's plug-in, --enable-lora, --middleware "
                "gym_fed.serving.vllm_plugin.uploads.AdapterUploads and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            )
        if status != 200:
            raise _refusal(status, content)
        return content

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, max_bytes: int = _MAX_BYTES, **options: Any
    ) -> tuple[int, bytes]:
        """Return status and body of an answer.

        Raises:
            GymError: ``PROTOCOL_MISMATCH`` for a body of more than ``max_bytes``, of which the rest is not read.
        """
        async with self._http.stream(method, path, **options) as answer:
            return answer.status_code, await _body(answer, max_bytes)

    async def _get(self, path: str, read: Callable[[Any], T]) -> T:
        """Return the result of ``read`` for the JSON at a path."""
        try:
            async with asyncio.timeout(_SHORT_SECONDS):
                status, content = await self._send("GET", path)
        except (httpx.RequestError, TimeoutError) as error:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"vLLM at {self._http.base_url} cannot be reached: {error!r}",
                "start it",
            ) from error
        if status == 401:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"vLLM at {self._http.base_url} rejected the key",
                "set api_key_file to the file that contains its key",
            )
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            return read(json.loads(content))
        except _UNKNOWN_FORM as error:
            raise GymError(
                ErrorCode.PROTOCOL_MISMATCH,
                f"{self._http.base_url}{path} is not a vLLM response: {plain(repr(error), _MAX_SHOWN)}",
            ) from error


async def _body(answer: httpx.Response, max_bytes: int) -> bytes:
    """Return the body of an answer.

    Raises:
        GymError: ``PROTOCOL_MISMATCH`` for more than ``max_bytes``, after decompression.
    """
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of an answer as they arrive. Raises the error of ``_body`` for a line over ``_MAX_BYTES``."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MAX_BYTES:
            raise _too_large(_MAX_BYTES)
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest.rstrip(b"\r")


def _too_large(max_bytes: int) -> GymError:
    return GymError(
        ErrorCode.PROTOCOL_MISMATCH,
        f"vLLM's answer has more than {counted(max_bytes, 'byte')}",
        "see its log",
    )


@contextmanager
def _named_failures() -> Iterator[None]:
    """Convert connection failures and answers of an unknown format to named errors."""
    try:
        yield
    except httpx.ConnectError as error:
        raise NotConnectedError from error
    except httpx.RequestError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE, "vLLM stopped before the end of the answer", "try again in a moment"
        ) from error
    except _UNKNOWN_FORM as error:
        problem = plain(repr(error), _MAX_SHOWN)
        raise GymError(
            ErrorCode.INTERNAL, f"vLLM's answer has an unknown format: {problem}", "see the log"
        ) from error


def _refusal(status: int, content: bytes) -> GymError:
    """Return the error for an answer whose status is not 200."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except _UNKNOWN_FORM:
        message = content.decode(errors="replace")
    message = plain(message, _MAX_SHOWN)
    if status >= 500:
        return GymError(ErrorCode.UNAVAILABLE, f"vLLM failed: {message}", "try again in a moment")
    if "could not be loaded" in message or status == 404:
        return GymError(
            ErrorCode.MODEL_INVALID,
            f"vLLM did not load the variant: {message}",
            "see vLLM's log; is gym-fed's plug-in installed there, with the same variant store?",
        )
    if status == 401:
        return GymError(ErrorCode.INTERNAL, "vLLM rejected the gateway's key", "restart the gateway")
    return GymError(ErrorCode.USAGE, f"vLLM rejected the request: {message}", "change the request")
