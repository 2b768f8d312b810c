"""The errors of this package."""

from __future__ import annotations


class CodecError(ValueError):
    """The error for invalid values, parameters or payload, with the reason."""
