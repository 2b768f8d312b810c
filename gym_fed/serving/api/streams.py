"""An answer as server-sent events, ended by ``data: [DONE]``; a client that goes away ends its generation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gym_fed.errors import GymError
from gym_fed.serving.api.waiting import ClientGone, Patience
from gym_fed.serving.openai.answers import Chunk
from gym_fed.serving.openai.pending import Pending
from gym_fed.serving.openai.refusals import error_body


class EventStream(Response):
    """A stream whose first chunk is there: what can be refused has been, with a status of its own.

    What fails later is told by an event ``{"error": ...}``, after which there is no ``[DONE]``.
    """

    def __init__(
        self, pending: Pending, first: Chunk, rest: AsyncIterator[Chunk], patience: Patience
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._pending = pending
        self._first = first
        self._rest = rest
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                await self._patience.wait(self._send_all(send))
                last = b"data: [DONE]\n\n"
            except GymError as error:
                last = _event(error_body(error))
            await send({"type": "http.response.body", "body": last})
        except ClientGone:
            pass
        finally:
            self._pending.end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": _event(self._first), "more_body": True})
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
