"""Markdown of the reference pages."""

from __future__ import annotations

import re


def cell(text: str) -> str:
    """``text`` as a cell of a table."""
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")
