"""Why a template or a pattern of a stranger was stopped."""

from __future__ import annotations

from typing import Literal

Limit = Literal["time", "memory", "output", "crash"]
SECONDS = 10.0
"""Time for one template or one pattern on one input; those that people write take milliseconds."""
MEMORY_BYTES = 768 << 20
"""Address space of the child process, of which its libraries take 150 MB."""
OUTPUT_CHARS = 16 << 20
"""Longest result; a conversation is far shorter."""


class LimitExceededError(Exception):
    """A template or a pattern needed more than it may.

    Neither a ``ValueError`` nor a ``TemplateError``: what catches those takes them for a refusal of one input.

    Attributes:
        limit: Which bound was exceeded.
        need: What was exceeded, as the end of a sentence: "takes longer than 10 s".
    """

    def __init__(self, limit: Limit, seconds: float = SECONDS) -> None:
        self.limit = limit
        self.need = {
            "time": f"takes longer than {seconds:g} s",
            "memory": f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
            "output": f"writes more than {OUTPUT_CHARS:,} characters",
            "crash": "ended the process that evaluated it",
        }[limit]
        super().__init__(self.need)
