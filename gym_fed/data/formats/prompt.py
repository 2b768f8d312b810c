"""Prompts for training by rewards: a text or a conversation, and every other column as it is, for the graders."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.base import Raw, as_object, string, system_of, with_context
from gym_fed.data.formats.turns import conversation

_READ = ("prompt", "system", "tools", "images", "image", "videos", "audios")


def read(raw: Any) -> Raw:
    """``{"prompt": ..., other columns}``."""
    row = as_object(raw)
    images: list[Any] = []
    prompt: Any
    if isinstance(row.get("prompt"), list):
        prompt = [*system_of(row), *conversation(row["prompt"], "prompt", images)]
    else:
        prompt = string(row, "prompt")
        if system := system_of(row):
            prompt = [*system, {"role": "user", "content": prompt}]
    rest = {key: value for key, value in row.items() if key not in _READ}
    return with_context(row, {**rest, "prompt": prompt, **({"images": images} if images else {})}, *row)
