"""``vllm serve``: answers ``/v1/completions`` on a Unix socket, and writes what it was asked to ``FAKE_VLLM_LOG``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SLOW = 7
"""A prompt that begins with this token is answered slowly."""
_SECONDS = 0.05


def main() -> None:
    """Run the command line; ``--fail`` ends at once."""
    words = sys.argv[1:]
    _log({"start": words})
    if "--fail" in words:
        sys.exit("ValueError: the fake vLLM fails on request")
    uvicorn.run(_app(), uds=words[words.index("--uds") + 1], log_level="warning")


def _log(value: dict[str, Any]) -> None:
    with Path(os.environ["FAKE_VLLM_LOG"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def _app() -> Starlette:
    running = 0

    async def complete(request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return JSONResponse({"error": {"message": "Unauthorized"}}, 401)
        body = await request.json()
        _log({"body": body, "running": running})
        model = body["model"]
        stored = Path(os.environ["GYM_VLLM_OBJECTS"]) / model[:2] / f"{model}.gymdelta"
        if model != "base" and not stored.is_file():
            return JSONResponse({"error": {"message": f"The model {model} does not exist."}}, 404)
        return StreamingResponse(stream(body), media_type="text/event-stream")

    async def stream(body: dict[str, Any]) -> AsyncIterator[str]:
        nonlocal running
        running += 1
        try:
            for chunk in _chunks(body):
                if body["prompt"][0] == SLOW:
                    await asyncio.sleep(_SECONDS)
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            running -= 1
            _log({"ended": body["prompt"]})

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/health", health), Route("/v1/completions", complete, methods=["POST"])])


def _chunks(body: dict[str, Any]) -> list[dict[str, Any]]:
    prompt, made = body["prompt"], []
    for number in range(body["max_tokens"]):
        token = prompt[number % len(prompt)]
        reason = "stop" if token in body["stop_token_ids"] else None
        if reason is None and number + 1 == body["max_tokens"]:
            reason = "length"
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [token], "finish_reason": reason}
        if "logprobs" in body:
            top = {f"token_id:{token}": -0.5, f"token_id:{token + 1}": -1.5}
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [-0.5],
                "top_logprobs": [top],
            }
        made.append({"choices": [choice]})
        if reason is not None:
            break
    details = {"cached_tokens": 3}
    return [*made, {"choices": [], "usage": {"prompt_tokens_details": details}}]
