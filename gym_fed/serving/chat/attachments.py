"""Attachments of a question in `gym chat`: pictures, audio and videos, as content parts of OpenAI's API."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError

MAX_BYTES = 6 * 2**20
_SUFFIXES = {
    **{
        ".png": "image/png",
        ".jpg": "image/jpeg",
        ".jpeg": "image/jpeg",
        ".webp": "image/webp",
        ".gif": "image/gif",
    },
    **{f".{name}": f"audio/{name}" for name in ("wav", "mp3", "flac", "ogg")},
    **{".mp4": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"},
}
_NOUNS = {"image_url": "picture", "input_audio": "sound", "video_url": "video"}


def read_attachment(path: Path) -> dict[str, Any]:
    """Read a file as a content part.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``USAGE`` for any other kind of file; ``TOO_LARGE`` above ``MAX_BYTES``.
    """
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise GymError(
            ErrorCode.USAGE,
            f"{path}: is not a picture, sound or video",
            f"attach one of {', '.join(_SUFFIXES)}",
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise GymError(
                ErrorCode.TOO_LARGE, f"{path}: has more than {MAX_BYTES:,} bytes", "make it smaller"
            )
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"{path}: {error.strerror}", "choose another file"
        ) from error
    medium, _, format = kind.partition("/")
    if medium == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": format}}
    name = f"{medium}_url"
    return {"type": name, name: {"url": f"data:{kind};base64,{data}"}}


def text_shown(content: str | list[dict[str, Any]]) -> str:
    """Return a message's content for display, with the kind of each attachment in brackets."""
    if isinstance(content, str):
        return content
    return " ".join(
        part["text"] if part["type"] == "text" else f"[{_NOUNS[part['type']]}]" for part in content
    )


def is_content(content: Any) -> bool:
    """Return True if a value is the content of a message: a text, or at least one part, each of a known type."""
    if isinstance(content, str):
        return True
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return isinstance(part.get("text"), str)
    return isinstance(kind, str) and kind in _NOUNS and isinstance(part.get(kind), dict)
