"""A vLLM whose answers are endless or of another form: bounded memory, and errors by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.vllm.client import VllmAddress, VllmClient

PART = b"x" * 65536
BODY = {"max_tokens": 4}


class Endless:
    """The body of an answer that never ends.

    Attributes:
        sent: The bytes that were read.
    """

    def __init__(self) -> None:
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            assert self.sent < 64 << 20, "it is read without a bound"
            self.sent += len(PART)
            yield PART


def ask(call: Callable[[VllmClient], Awaitable[Any]], status: int, content: Any, **headers: str) -> Any:
    """The result of a call to a vLLM that always answers with ``content``."""

    async def asked() -> Any:
        client = VllmClient(VllmAddress("http://vllm", None, ""))

        def answer(_: httpx.Request) -> httpx.Response:
            return httpx.Response(status, content=content, headers=headers)

        client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://vllm")
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(asked())


async def _streamed(client: VllmClient) -> list[Any]:
    return [chunk async for chunk in client.generate(BODY)]


CALLS: dict[str, Callable[[VllmClient], Awaitable[Any]]] = {
    "version": lambda client: client.version(),
    "models": lambda client: client.models(),
    "complete": lambda client: client.complete(BODY),
    "generate": _streamed,
    "load": lambda client: client.load_adapter("policy", b""),
    "unload": lambda client: client.unload_adapter("policy"),
}


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("call", CALLS)
def test_an_endless_answer_is_cut_off(call: str, status: int) -> None:
    body = Endless()
    with pytest.raises(GymError, match="more than") as error:
        ask(CALLS[call], status, body)
    assert error.value.code is ErrorCode.PROTOCOL_MISMATCH
    assert body.sent < 4 << 20


def test_health_needs_no_body() -> None:
    body = Endless()
    assert ask(lambda client: client.is_healthy(), 200, body) is True
    assert body.sent <= len(PART)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"[]",
        b"7",
        b'{"choices": [7]}',
        b'{"choices": {"a": 1}, "data": [7], "version": {}}',
        b'{"choices": [{"token_ids": [Infinity]}], "data": [{"id": "a", "max_model_len": Infinity}]}',
    ],
)
@pytest.mark.parametrize("call", ["models", "complete", "load"])
def test_an_answer_of_another_form_has_a_name(call: str, content: bytes) -> None:
    with pytest.raises(GymError, match=r"not a vLLM|unknown form"):
        ask(CALLS[call], 200, content)


def test_a_stream_that_is_not_compressed_as_it_says_has_a_name() -> None:
    for call in ("models", "complete", "generate"):
        with pytest.raises(GymError) as error:
            ask(CALLS[call], 200, b"no gzip", **{"content-encoding": "gzip"})
        assert error.value.code is ErrorCode.UNAVAILABLE


def test_messages_are_shown_without_control_characters() -> None:
    with pytest.raises(GymError) as error:
        ask(CALLS["complete"], 400, b'{"error": {"message": "\\u001b[2Jcleared"}}')
    assert "\x1b" not in error.value.message
    assert "cleared" in error.value.message
