"""The limits of the child process, and the error for exceeding one."""

from __future__ import annotations

from typing import Literal

Limit = Literal["time", "memory", "output", "crash"]
SECONDS = 10.0
"""Time limit for one template or pattern on one input; ordinary ones take milliseconds."""
MEMORY_BYTES = 768 << 20
"""Address space of the child process; its libraries need 150 MB of it."""
OUTPUT_CHARS = 16 << 20
"""Maximum length of a result; conversations are far shorter."""


class LimitExceededError(Exception):
    """A template or a pattern exceeded a limit.

    This is not a ``ValueError`` or ``TemplateError``, because callers treat those as the rejection of one input.

    Attributes:
        limit: Name of the exceeded limit.
        need: Verb phrase that completes the error message, such as "takes longer than 10 s".
    """

    def __init__(self, limit: Limit, seconds: float = SECONDS) -> None:
        self.limit = limit
        self.need = {
            "time": f"takes longer than {seconds:g} s",
            "memory": f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
            "output": f"writes more than {OUTPUT_CHARS:,} characters",
            "crash": "crashed the process that evaluated it",
        }[limit]
        super().__init__(self.need)
