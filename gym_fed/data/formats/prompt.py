"""Prompts for reinforcement learning: a text or conversation; other columns are passed to the graders."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats._turns import conversation
from gym_fed.data.formats.base import Format, Raw, string, system_of, with_context
from gym_fed.data.rows import MEDIA

_READ = ("prompt", "system", "tools", *MEDIA, *MEDIA.values())


class Prompt(Format):
    """``{"prompt": ..., other columns}``."""

    order = 70
    kind = "prompt"

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "prompt" in row

    def read(self, row: Raw) -> Raw:
        prompt: Any
        if isinstance(row.get("prompt"), list):
            prompt = [*system_of(row), *conversation(row["prompt"], "prompt")]
        else:
            prompt = string(row, "prompt")
            if system := system_of(row):
                prompt = [*system, {"role": "user", "content": prompt}]
        rest = {key: value for key, value in row.items() if key not in _READ}
        return {**rest, **with_context(row, {"prompt": prompt}, *row)}
