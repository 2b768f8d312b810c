"""Plain text in the column ``text``, which is learned completely."""

from __future__ import annotations

from gym_fed.data.formats.base import BadRow, Format, Raw, string, without_context


class Text(Format):
    """``{"text": str}``."""

    order = 80

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "text" in row

    def read(self, row: Raw) -> Raw:
        return without_context(row, {"text": string(row, "text")}, "text")

    def write(self, row: Raw) -> Raw:
        if "text" not in row:
            raise BadRow("has speakers, which the format text would lose", "choose messages or sharegpt")
        return row
