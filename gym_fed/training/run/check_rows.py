"""Prompts and answers of rows, as the check of a run shows them."""

from __future__ import annotations

from typing import Any


def prompt_of(row: dict[str, Any]) -> str | list[dict[str, Any]] | None:
    """Return a row's prompt up to the last answer; None for texts, encoded rows, and rows with tools or images."""
    if row.get("tools") or row.get("images"):
        return None
    if "messages" in row:
        messages = list(row["messages"])
        if len(messages) > 1 and messages[-1].get("role") == "assistant":
            return messages[:-1]
        return None
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str | list) and prompt else None


def answer_of(row: dict[str, Any]) -> str:
    """Return the row's answer to its prompt; empty if it has none."""
    for key in ("completion", "answer", "chosen"):
        value = row.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            last = value[-1]
            return str(last.get("content") or "") if isinstance(last, dict) else str(last)
    messages = row.get("messages")
    return str(messages[-1].get("content") or "") if messages else ""


def shown_prompt(prompt: str | list[dict[str, Any]] | None) -> str:
    """Return the last message of a prompt, as it is printed."""
    if isinstance(prompt, list):
        return str(prompt[-1].get("content") or "")
    return prompt or ""
