"""``GET /v1/responses/{id}/input_items``: what a stored response answers, as items and in pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_fed.serving.openai.fields import unsupported
from gym_fed.serving.openai.refusals import RequestError

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


def input_items(answer_id: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items before a response, those of earlier responses that it goes on from too.

    Args:
        answer_id: Of the response; the ids of its items are made of it.
        messages: The stored conversation, whose last message is the answer.
    """
    found = [item for message in messages[:-1] for item in _items(message)]
    name = answer_id.removeprefix("resp_")
    return [
        {"id": f"item_{name}_{number}", **item, "status": "completed"} for number, item in enumerate(found)
    ]


def page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of a list, as OpenAI's clients turn them.

    Args:
        items: All of them, oldest first.
        query: ``limit``, ``order`` and ``after`` of the request.

    Raises:
        RequestError: For a value that cannot be, or another field.
    """
    for name in query:
        if name not in ("limit", "order", "after"):
            raise unsupported(name[:80])
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise RequestError("field 'order' must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LIMIT):
        raise RequestError(f"field 'limit' must be a number from 1 to {_MAX_LIMIT}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise RequestError("field 'after' names no item of this response", param="after")
        ordered = ordered[place + 1 :]
    data = ordered[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > len(data),
    }


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
        return
    if content:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield {"type": "message", "role": role, "content": [_part(part, role) for part in parts]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part["type"] == "image_url":
        picture = part["image_url"]
        return {
            "type": "input_image",
            "image_url": picture["url"],
            "detail": picture.get("detail") or "auto",
            "file_id": None,
        }
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": []}
    return {"type": "input_text", "text": part["text"]}
