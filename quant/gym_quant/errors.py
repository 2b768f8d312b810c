"""The errors of this package."""

from __future__ import annotations


class CodecError(ValueError):
    """Invalid values, parameters or payload, with the reason."""
