"""Plain text in the column ``text``, which is learned completely."""

from __future__ import annotations

from gym_fed.data.formats.base import BadRow, Format, Raw, string, system_of, with_context
from gym_fed.data.rows import MEDIA


class Text(Format):
    """``{"text": str}``."""

    order = 80

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "text" in row

    def read(self, row: Raw) -> Raw:
        converted = with_context(row, {"text": string(row, "text")}, "text")
        if lost := [key for key in ("tools", *MEDIA) if key in converted] + ["system"] * bool(system_of(row)):
            raise BadRow(
                f"has {lost[0]!r} next to its text", "write a conversation (messages), or remove the key"
            )
        return converted

    def write(self, row: Raw) -> Raw:
        if "text" not in row:
            raise BadRow("has speakers, which the format text would lose", "choose messages or sharegpt")
        return row
