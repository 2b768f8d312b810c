"""The errors of this package."""

from __future__ import annotations


class CodecError(ValueError):
    """Values, parameters or payload that a codec refuses; the message says which and why."""
