"""A chat session, which drops its oldest messages when the context is full, and its attachments.

A ``Writer`` generates the answers, with the model in this process or a server with OpenAI's API. Both receive the same
requests.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically

ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


class ThoughtText(str):
    """A part of a reasoning model's thought, which is not part of the conversation."""

    __slots__ = ()


class Writer(Protocol):
    """Generates the answers of a session."""

    @property
    def base(self) -> str:
        """The name of the model in requests; a variant is ``<base>:<name>``."""

    @property
    def remembers(self) -> bool:
        """True if the model has a chat template. A model without one only continues texts."""

    def variants(self) -> list[str]:
        """Return the names of the variants that may be requested."""

    def write(self, url: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Stream chunks in OpenAI's format; closing the iterator stops the answer.

        Raises:
            GymError: ``TOO_LARGE`` if the prompt leaves no room for an answer; or another refusal.
        """

    def close(self) -> None:
        """Free its resources."""


class ChatSession:
    """The messages of a conversation, and the settings of the next answer.

    Args:
        writer: The writer that generates the answers.
        system: The system message, which is never dropped.
        variant: A variant of the writer; None is the base.
        sampling: Further fields of the request, such as ``temperature``.

    Attributes:
        messages: All messages of user and assistant, oldest first.
        forgotten: Number of oldest messages that no longer fit the context.
        finish_reason: Why the last answer ended; ``stopped`` if it was interrupted.
        attached: Content parts to send with the next question.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        system: str | None = None,
        variant: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.writer = writer
        self.system = system
        self.variant: str | None = None
        self.sampling = dict(sampling or {})
        self.messages: list[Message] = []
        self.attached: list[dict[str, Any]] = []
        self.forgotten = 0
        self.finish_reason: str | None = None
        self._own_files: set[Path] = set()
        if system is not None:
            self.require_memory("a system message")
        self.switch(variant)

    @property
    def model(self) -> str:
        """The name of the model in requests."""
        return self.writer.base if self.variant is None else f"{self.writer.base}:{self.variant}"

    def switch(self, variant: str | None) -> None:
        """Use a different variant for the next answers; the messages are kept.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        if variant is not None and variant not in (known := self.writer.variants()):
            listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
            hint = f"available variants: {listed}" if known else "this model is served without variants"
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {variant!r} of {self.writer.base}", hint)
        self.variant = variant

    def require_memory(self, operation: str) -> None:
        """Refuse an operation that needs a chat template if the model has none."""
        if not self.writer.remembers:
            raise GymError(
                ErrorCode.USAGE,
                f"{operation} needs a chat template, but {self.writer.base} has none",
                "this model only continues text",
            )

    def attach(self, path: Path) -> None:
        """Attach a picture, sound or video to the next question.

        Raises:
            GymError: Errors from ``read_attachment``; ``USAGE`` for a model without a chat template.
        """
        self.require_memory("an attachment")
        self.attached.append(read_attachment(path))

    def say(self, text: str) -> Generator[str]:
        """Stream the answer to ``text`` and the attachments; parts of the thought are ``ThoughtText``.

        An answer that ends early (the iterator is closed, or fails) is stored up to that point. If it is empty,
        ``text`` is not stored either, and the attachments are kept for the next question.

        Raises:
            GymError: ``TOO_LARGE`` if ``text`` alone does not fit the context; or the writer's refusal.
        """
        if not self.writer.remembers:
            yield from self._texts("/v1/completions", {"prompt": text})
            return
        parts, self.attached = self.attached, []
        content = [*parts, {"type": "text", "text": text}] if parts else text
        question: Message = {"role": "user", "content": content}
        pieces: list[str] = []
        is_complete = False
        try:
            with closing(self._chat([*self.messages, question])) as texts:
                for part in texts:
                    if not isinstance(part, ThoughtText):
                        pieces.append(part)
                    yield part
            is_complete = True
        finally:
            if pieces or is_complete:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
            else:
                self.attached = [*parts, *self.attached]

    def undo(self) -> tuple[str, list[dict[str, Any]]] | None:
        """Remove the last question and its answer; return the question's text and attachments, or None without one."""
        while self.messages:
            message = self.messages.pop()
            self.forgotten = min(self.forgotten, len(self.messages))
            if message["role"] == "user":
                content = message["content"]
                if isinstance(content, str):
                    return content, []
                texts = [part["text"] for part in content if part["type"] == "text"]
                return "\n".join(texts), [part for part in content if part["type"] != "text"]
        return None

    def reset(self) -> None:
        """Remove all messages except the system message, and the attachments of the next question."""
        self.messages, self.attached = [], []
        self.forgotten = 0

    def save(self, path: Path) -> None:
        """Write all messages, starting with the system message, as a JSON list; only files of this conversation are
        replaced.

        Raises:
            GymError: ``USAGE`` if there are no messages; ``FILE_EXISTS`` for any other file; ``FILE_NOT_FOUND`` if no
                file can be written.
        """
        if not self.messages:
            raise GymError(ErrorCode.USAGE, "there are no messages to save")
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        text = json.dumps([*system, *self.messages], ensure_ascii=False, indent=2) + "\n"
        place = path.resolve()
        if place.exists() and place not in self._own_files:
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{path} already exists, but was not saved or loaded in this chat",
                "choose another file",
            )
        if not path.parent.is_dir():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND, f"{path}: no folder {path.parent}", "create it, or choose another"
            )
        try:
            write_atomically(path, text.encode(), mode=0o600)
            self._own_files.add(place)
        except OSError as error:
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"{path}: cannot be written: {error.strerror}",
                "choose another file",
            ) from error

    def load(self, path: Path) -> None:
        """Replace the messages with those in a file that ``save`` wrote.

        Raises:
            GymError: ``FILE_NOT_FOUND``, or ``DATA_INVALID`` naming the invalid message; nothing changes then.
        """
        messages = read_messages(path)
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.require_memory("a conversation")
        self.system, self.messages, self.forgotten = system, messages, 0
        self._own_files.add(path.resolve())

    def _chat(self, messages: list[Message]) -> Generator[str]:
        """Send as many messages as fit, dropping the oldest questions with their answers."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        while True:
            sent = messages[self.forgotten :]
            texts = self._texts("/v1/chat/completions", {"messages": [*system, *sent]})
            try:
                first = next(texts, None)
            except GymError as error:
                later = [place for place, message in enumerate(sent) if message["role"] == "user"][1:]
                if error.code is not ErrorCode.TOO_LARGE or not later:
                    raise
                self.forgotten += later[0]
                continue
            if first is not None:
                yield first
                yield from texts
            return

    def _texts(self, url: str, prompt: dict[str, Any]) -> Generator[str]:
        """Yield the texts of the chunks, and set ``finish_reason``."""
        self.finish_reason = "stopped"
        with closing(self.writer.write(url, {"model": self.model, **prompt, **self.sampling})) as chunks:
            for chunk in chunks:
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield ThoughtText(thought)
                    text = choice.get("text") or delta.get("content")
                    if choice.get("finish_reason"):
                        self.finish_reason = choice["finish_reason"]
                    if text:
                        yield text


def read_messages(path: Path) -> list[Message]:
    """Read a JSON list of ``{"role", "content"}``, with at most one system message, which is the first."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"{path}: {error.strerror}", "choose another file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{path}: not JSON: {error}") from error
    if not isinstance(messages, list):
        raise GymError(ErrorCode.DATA_INVALID, f"{path}: not a list of messages")
    for number, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or message.keys() != {"role", "content"}
            or message["role"] not in ROLES
            or not is_content(message["content"])
            or (message["role"] != "user" and not isinstance(message["content"], str))
            or (message["role"] == "system" and number > 1)
        ):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{path}: message {number} is invalid",
                'write {"role": "user" or "assistant", "content": TEXT}; only the first message can be a '
                "system message",
            )
    return messages


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
_NOUNS = {"image_url": "image", "input_audio": "audio", "video_url": "video"}


def read_attachment(path: Path) -> dict[str, Any]:
    """Read a file as a content part.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``USAGE`` for any other kind of file; ``TOO_LARGE`` above ``MAX_BYTES``.
    """
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise GymError(
            ErrorCode.USAGE,
            f"{path} is not an image, audio or video file",
            f"attach one of {', '.join(_SUFFIXES)}",
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise GymError(
                ErrorCode.TOO_LARGE, f"{path} has more than {MAX_BYTES:,} bytes", "make it smaller"
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
