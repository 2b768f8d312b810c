"""The pictures of a request's messages, read from data URLs and refused with their position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import ImagePart, Message, UserMessage
from gym_fed.serving.pictures.decoding import Picture, read_picture, require_few
from gym_fed.serving.pictures.processor import require_wanted
from gym_fed.serving.pictures.reader import ExpandedPrompt, NoPictures, PictureReader

if TYPE_CHECKING:
    from gym_fed.serving.pictures.processor import ProcessedPicture

_KINDS = ("image_url", "input_image")
_REFUSAL = (
    "content parts of type 'image_url' are not supported here: text alone. {why}: describe the picture in words, or "
    "send it to a server of vision models, such as vLLM or llama.cpp with --mmproj"
)


class MessagePictures:
    """The pictures of one request.

    Args:
        messages: The messages of the request.
        reader: The reader of the model.

    Raises:
        RequestError: For a picture that is refused by its header, and for any if the model reads none.
    """

    def __init__(self, messages: Sequence[Message], reader: PictureReader | NoPictures) -> None:
        self._reader = reader
        self._read: dict[int, tuple[Picture, str]] = {}
        self._processed: dict[bytes, ProcessedPicture] = {}
        pixels = 0
        for place, part in _parts(messages):
            if isinstance(reader, NoPictures):
                raise RequestError(
                    f"field {place!r}: {_REFUSAL.format(why=reader.why)}",
                    param=place,
                    name="unsupported_parameter",
                )
            with _refusals(f"{place}.image_url"):
                picture = read_picture(part.image_url.url, part.image_url.detail or "auto")
                reader.processor.require_detail(picture)
            self._read[id(part)] = picture, f"{place}.image_url"
            pixels += picture.pixels
            with _refusals("messages"):  # before the next one is read
                require_few(len(self._read), pixels)

    def __len__(self) -> int:
        return len(self._read)

    def expand(self, ids: list[int], messages: Sequence[Message]) -> ExpandedPrompt:
        """Expand a prompt of some of the messages, as the chat template writes it, to its pictures' tokens.

        Raises:
            RequestError: For a broken picture, and for a template that does not write a place for each.
        """
        if isinstance(self._reader, NoPictures) or not self._read:
            return ExpandedPrompt(ids)
        reader = self._reader
        read = [self._read[id(part)] for _, part in _parts(messages)]
        places = reader.places(ids)
        if places != len(read):
            raise RequestError(
                f"this model's chat template writes {places} places for {len(read)} pictures",
                param="messages",
                hint="start the server with a chat template for pictures (chat_template)",
            )
        return reader.expand(
            ids, [(picture, self._process(reader, picture, place)) for picture, place in read]
        )

    def _process(self, reader: PictureReader, picture: Picture, place: str) -> ProcessedPicture:
        processed = self._processed.get(picture.digest)
        if processed is None:
            require_wanted()
            with _refusals(place):
                processed = self._processed[picture.digest] = reader.processor.process(picture)
        return processed


def count_pictures(body: Any) -> int:
    """Count the pictures of an unvalidated body. An earlier response counts as one, since it may have some."""
    if not isinstance(body, dict):
        return 0
    given = [item for name in ("messages", "input") for item in _listed(body.get(name))]
    contents = (part for item in given if isinstance(item, dict) for part in _listed(item.get("content")))
    kinds = (part.get("type") for part in contents if isinstance(part, dict))
    return (body.get("previous_response_id") is not None) + sum(kind in _KINDS for kind in kinds)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, ImagePart]]:
    """Yield every picture and its position, in order."""
    for index, message in enumerate(messages):
        if isinstance(message, UserMessage) and not isinstance(message.content, str):
            for number, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield f"messages[{index}].content[{number}]", part


@contextmanager
def _refusals(place: str) -> Iterator[None]:
    """Name the position in errors raised within; all of them are the request's fault."""
    try:
        yield
    except GymError as error:
        if error.code not in (ErrorCode.USAGE, ErrorCode.TOO_LARGE):
            raise
        raise RequestError(
            f"field {place!r}: {error.message}",
            param=place,
            name="image_too_large" if error.code is ErrorCode.TOO_LARGE else "invalid_image",
            hint=error.hint,
        ) from error
