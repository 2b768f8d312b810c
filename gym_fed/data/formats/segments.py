"""Axolotl's input_output: segments of text that are joined unchanged; those with ``label: true`` are learned."""

from __future__ import annotations

from gym_fed.data.formats.base import BadRow, Format, Raw, note_unread, without_context


class SegmentRows(Format):
    """``{"segments": [{"label": bool, "text": str}]}``."""

    order = 45

    @classmethod
    def matches(cls, row: Raw) -> bool:
        given = row.get("segments")  # transcripts have segments of a different kind next to their text
        parts = [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []
        return any(part.keys() >= {"label", "text"} for part in parts)

    def read(self, row: Raw) -> Raw:
        given = row.get("segments")
        if not isinstance(given, list) or not given:
            raise BadRow("'segments' is not a list", 'write [{"label": true, "text": ...}, ...]')
        segments = []
        for segment in given:
            if not (
                isinstance(segment, dict)
                and isinstance(segment.get("label"), bool)
                and isinstance(segment.get("text"), str)
            ):
                raise BadRow(
                    "a segment lacks its text or its label", 'write {"label": true or false, "text": ...}'
                )
            note_unread(f"a segment's {key}" for key in segment if key not in ("label", "text"))
            segments.append({"label": segment["label"], "text": segment["text"]})
        return without_context(row, {"segments": segments}, "segments")

    def write(self, row: Raw) -> Raw:
        if "segments" not in row:
            raise BadRow("has no segments", "choose messages or completion")
        return row
