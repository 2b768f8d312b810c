"""The errors of this package."""

from __future__ import annotations


class CodecError(ValueError):
    """Invalid values, parameters or payload; the message says which and why."""
