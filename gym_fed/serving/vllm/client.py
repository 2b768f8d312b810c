"""The HTTP client of one vLLM, over a Unix socket or a URL."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.vllm.bodies import AnswerChunk, read_chunk
from gym_fed.serving.vllm_plugin.uploads import PREFIX

_CONNECT_SECONDS = 10.0
_SHORT_SECONDS = 30.0
_MAX_SHOWN = 300


@dataclass(frozen=True)
class VllmAddress:
    """Where a vLLM listens.

    Attributes:
        url: Its URL; with a socket only the path counts.
        socket: A Unix socket; None: TCP.
        key: The API key; "" for none.
    """

    url: str
    socket: Path | None
    key: str


class NotConnectedError(Exception):
    """The error for a request that never reached vLLM, and may be sent again."""


class VllmClient:
    """Requests to one vLLM, on one event loop.

    Args:
        address: Where it listens.
    """

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
        """Return whether vLLM answers that its engine runs."""
        try:
            return (await self._http.get("/health", timeout=_SHORT_SECONDS)).status_code == 200
        except httpx.TransportError:
            return False

    async def version(self) -> str:
        """Return vLLM's version, such as ``0.32.0+cpu``.

        Raises:
            GymError: ``UNAVAILABLE``; ``PROTOCOL_MISMATCH`` if this is no vLLM.
        """
        return str((await self._get("/version"))["version"])

    async def models(self) -> dict[str, int]:
        """Return the context length of every base model by its name.

        Raises:
            GymError: As ``version``; ``UNAUTHENTICATED`` for a wrong key.
        """
        found = await self._get("/v1/models")
        return {m["id"]: int(m["max_model_len"]) for m in found["data"] if m.get("parent") is None}

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[AnswerChunk]:
        """Stream an answer; closing the iterator cancels it in vLLM.

        Args:
            body: As ``completion_body`` returns it.

        Raises:
            NotConnectedError: If vLLM cannot be reached.
            GymError: ``UNAVAILABLE`` if it stops; ``USAGE`` or ``MODEL_INVALID`` with its
                message if it refuses the request or the variant.
        """
        with _named_failures():
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield read_chunk(json.loads(line[6:]))

    async def complete(self, body: dict[str, Any]) -> AnswerChunk:
        """Return a whole answer.

        Args:
            body: As ``completion_body`` returns it with ``stream=False``.

        Raises:
            NotConnectedError: As ``generate``; so do the other errors.
        """
        with _named_failures():
            answer = await self._http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise _refusal(answer.status_code, answer.content)
            return read_chunk(answer.json())

    async def load_adapter(self, name: str, content: bytes) -> None:
        """Send an adapter to ``uploads.AdapterUploads`` of the plug-in, and load it under a name.

        Args:
            name: Lower-case letters, digits and dashes.
            content: A safetensors file with the adapter's config in its metadata.

        Raises:
            NotConnectedError: As ``generate``; so do the other errors.
            GymError: ``PROTOCOL_MISMATCH`` if vLLM runs without the plug-in's uploads or without LoRA.
        """
        with _named_failures():
            stored = await self._http.put(PREFIX + name, content=content)
            self._require_loaded(name, stored)
            body = {"lora_name": name, "lora_path": stored.json()["path"]}
            self._require_loaded(name, await self._http.post("/v1/load_lora_adapter", json=body))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter and delete its files; one that is not there has no effect.

        Raises:
            NotConnectedError: As ``generate``; ``GymError`` ``UNAVAILABLE`` if vLLM stops.
        """
        with _named_failures():
            await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            await self._http.delete(PREFIX + name)

    def _require_loaded(self, name: str, answer: httpx.Response) -> None:
        if answer.status_code == 404:
            raise GymError(
                ErrorCode.PROTOCOL_MISMATCH,
                f"vLLM at {self._http.base_url} takes no adapters",
                "start it with gym-fed's plug-in, --enable-lora, --middleware "
                "gym_fed.serving.vllm_plugin.uploads.AdapterUploads and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            )
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.content)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _get(self, path: str) -> Any:
        try:
            answer = await self._http.get(path, timeout=_SHORT_SECONDS)
        except httpx.TransportError as error:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"vLLM at {self._http.base_url} cannot be reached: {error!r}",
                "start it",
            ) from error
        if answer.status_code == 401:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"vLLM at {self._http.base_url} refuses the key",
                "name the file of its key with api_key_file",
            )
        try:
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise GymError(
                ErrorCode.PROTOCOL_MISMATCH, f"{self._http.base_url}{path} is not of a vLLM: {error!r}"
            ) from error


@contextmanager
def _named_failures() -> Iterator[None]:
    """Turn failures of a connection, and answers of an unknown form, into named errors."""
    try:
        yield
    except httpx.ConnectError as error:
        raise NotConnectedError from error
    except httpx.TransportError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE, "vLLM stopped before the end of the answer", "try again in a moment"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise GymError(
            ErrorCode.INTERNAL, f"vLLM's answer has an unknown form: {error!r}", "see the log"
        ) from error


def _refusal(status: int, content: bytes) -> GymError:
    """Return the error for an answer that is not 200."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        message = content.decode(errors="replace")
    message = message[:_MAX_SHOWN]
    if status >= 500:
        return GymError(ErrorCode.UNAVAILABLE, f"vLLM failed: {message}", "try again in a moment")
    if "could not be loaded" in message or status == 404:
        return GymError(
            ErrorCode.MODEL_INVALID,
            f"vLLM did not load the variant: {message}",
            "vLLM's log has the reason; is gym-fed's plug-in installed there, with the same variant store?",
        )
    if status == 401:
        return GymError(ErrorCode.INTERNAL, "vLLM refuses the gateway's key", "restart the gateway")
    return GymError(ErrorCode.USAGE, f"vLLM refused the request: {message}", "change the request")
