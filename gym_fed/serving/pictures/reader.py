"""Read a request's pictures from its messages' data URLs, expand them to tokens, and compute their features."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gym_fed.base.modeling.processors import load_processor
from gym_fed.base.models import resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import ImagePart, Message, UserMessage
from gym_fed.serving.pictures.decoding import Picture, read_picture, require_limits
from gym_fed.serving.pictures.processor import (
    FAMILIES,
    PictureProcessor,
    ProcessedPicture,
    require_wanted,
    why_not,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.chunk import PlacedPicture


_KINDS = ("image_url", "input_image")


_REFUSAL = (
    "content parts of type 'image_url' are not supported here, only text. {why}: describe the picture in words, or "
    "send it to a server of vision models, such as vLLM or llama.cpp with --mmproj"
)


class MessagePictures:
    """The pictures of one request.

    Args:
        messages: The messages of the request.
        reader: The reader of the model.

    Raises:
        RequestError: For a picture that is refused by its header, and for any picture if the model reads none.
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
                require_limits(len(self._read), pixels)

    def __len__(self) -> int:
        return len(self._read)

    def expand(self, ids: list[int], messages: Sequence[Message]) -> ExpandedPrompt:
        """Expand the rendered prompt of some of the messages to the tokens of their pictures.

        Raises:
            RequestError: For a broken picture, and for a template that does not write a placeholder for each.
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
    """Count the pictures of an unvalidated body; an earlier response counts as one, since it may contain some."""
    if not isinstance(body, dict):
        return 0
    items = [item for name in ("messages", "input") for item in _listed(body.get(name))]
    contents = (part for item in items if isinstance(item, dict) for part in _listed(item.get("content")))
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
    """Name the position in errors raised within, all of which the request has caused."""
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


CACHE_BYTES = 256 * 2**20
OWNER_BYTES = 2 * 2**30
"""Maximum bytes of features in one owner's requests, including waiting ones: 16 pictures for an 8B model may need 750
MB."""


class PictureEncoder:
    """Computes picture features, from any thread, one picture at a time, in parallel with the engine's steps.

    Nothing else uses the vision tower. Cached features are only reused for their owner.

    Args:
        model: The vision model; only read.
        cache_bytes: Maximum bytes of cached features.
        owner_bytes: Maximum bytes of features in one owner's requests that are not cached.
    """

    def __init__(self, model: Any, cache_bytes: int = CACHE_BYTES, owner_bytes: int = OWNER_BYTES) -> None:
        self._model, self._limit, self._owner_limit = model, cache_bytes, owner_bytes
        self._used: WeakValueDictionary[tuple[str, bytes], Tensor] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self._bytes = 0
        self.computed = 0

    def features(self, picture: Picture, processed: ProcessedPicture, owner: str) -> Tensor:
        """Return the features ``[places, hidden]`` on the model's device.

        Args:
            picture: The picture.
            processed: Its tokens and input.
            owner: The owner of cached features; timing must not show what others sent.

        Raises:
            GymError: ``BUSY`` if the owner's requests have too many; ``INTERNAL`` if the model's number of features
                differs from the processor's number of places.
        """
        key = owner, picture.digest
        with self._lock:
            if (features := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return features
            if (features := self._used.get(key)) is None:
                self._require_room(owner)
                features = self._used[key] = self._compute(processed)
            self._keep(key, features)
            return features

    def _require_room(self, owner: str) -> None:
        used = [(key[0], features.nbytes) for key, features in self._used.items() if key not in self._kept]
        if sum(size for whose, size in used if whose == owner) >= self._owner_limit:
            raise GymError(
                ErrorCode.BUSY,
                "the requests of this user that wait or run have as many pictures as there is memory for",
                "try again when some are answered",
            )

    def _compute(self, processed: ProcessedPicture) -> Tensor:
        import torch

        weights = next(self._model.parameters())
        inputs = {
            key: value.to(weights.device, weights.dtype if value.is_floating_point() else None)
            for key, value in processed.inputs.items()
        }
        with torch.inference_mode():
            output = self._model.get_image_features(**inputs, return_dict=True).pooler_output
            parts = output if isinstance(output, list | tuple) else [output]
            features = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(features) != len(processed.places):
            raise GymError(
                ErrorCode.INTERNAL,
                f"a picture has {len(features)} features for {counted(len(processed.places), 'token')}",
                "the model's config.json and processor_config.json do not fit each other: restore them",
            )
        self.computed += 1
        return features

    def _keep(self, key: tuple[str, bytes], features: Tensor) -> None:
        self._kept[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._limit and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes


@dataclass(frozen=True, eq=False)
class PictureRun:
    """A picture in a prompt, whose features may not be computed yet.

    Attributes:
        start: The first token of its run.
        picture: The picture.
        processed: Its tokens and input.
    """

    start: int
    picture: Picture
    processed: ProcessedPicture


@dataclass(frozen=True, eq=False)
class ExpandedPrompt:
    """A prompt in which every picture has all of its tokens.

    Attributes:
        ids: Token ids.
        runs: The pictures, in order.
    """

    ids: list[int]
    runs: tuple[PictureRun, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class NoPictures:
    """The replacement of a ``PictureReader`` if pictures are refused.

    Attributes:
        why: The reason, for the refusal.
    """

    why: str = "This server only computes text models"


class PictureReader:
    """Reads the pictures of one model's prompts. Thread-safe.

    Args:
        processor: The processor of the model.
        encoder: The encoder of the model.
    """

    def __init__(self, processor: PictureProcessor, encoder: PictureEncoder) -> None:
        self.processor, self.encoder = processor, encoder

    @classmethod
    def open(cls, name: str, model: Any) -> PictureReader | NoPictures:
        """Open the reader of a loaded model; ``NoPictures`` for text models, and for families that are not served.

        Args:
            name: The name or folder with its processor.
            model: The loaded model.

        Raises:
            GymError: As ``load_processor`` and ``PictureProcessor``.
        """
        if getattr(model.config, "vision_config", None) is None:
            # Only the language model of some vision models was loaded
            kind = _vision_type(Path(resolve(name)))
            return NoPictures() if kind is None else _not_read(kind)
        if (family := FAMILIES.get(model.config.model_type)) is None:
            return _not_read(model.config.model_type)
        processor = PictureProcessor(load_processor(name), family, int(model.config.image_token_id))
        return cls(processor, PictureEncoder(model))

    @property
    def chat_template(self) -> str | None:
        """The template of the processor, which may have one if the tokenizer has none."""
        template = self.processor.chat_template
        return template if isinstance(template, str) else None

    def places(self, ids: Sequence[int]) -> int:
        """Count the pictures that a prompt has places for."""
        return list(ids).count(self.processor.image_token_id)

    def expand(
        self, ids: Sequence[int], pictures: Sequence[tuple[Picture, ProcessedPicture]]
    ) -> ExpandedPrompt:
        """Expand a prompt with one token per picture, as the chat template writes it, to all of their tokens."""
        expanded: list[int] = []
        runs: list[PictureRun] = []
        remaining = iter(pictures)
        for token in ids:
            if token != self.processor.image_token_id:
                expanded.append(token)
                continue
            picture, processed = next(remaining)
            runs.append(PictureRun(len(expanded), picture, processed))
            expanded += processed.run
        return ExpandedPrompt(expanded, tuple(runs))

    def placed(self, prompt: ExpandedPrompt, owner: str) -> tuple[PlacedPicture, ...]:
        """Return the pictures of a prompt for the engine; features are computed unless the owner has cached ones.

        Raises:
            GymError: As ``PictureEncoder.features`` and ``require_wanted``.
        """
        from gym_fed.serving.forward.chunk import PlacedPicture  # imports torch

        placed = []
        for run in prompt.runs:
            require_wanted()
            features = self.encoder.features(run.picture, run.processed, owner)
            length, places = len(run.processed.run), run.processed.places
            placed.append(PlacedPicture(run.start, length, places, features, run.picture.digest))
        return tuple(placed)


def _not_read(kind: str) -> NoPictures:
    return NoPictures(f"Pictures of {kind} models are not read here, as {why_not(kind)}")


def _vision_type(folder: Path) -> str | None:
    """Return the type of a folder's model; None without a vision config."""
    with suppress(OSError, ValueError, AttributeError):  # loading has reported it
        config = read_object(folder / "config.json")
        return str(config.get("model_type")) if "vision_config" in config else None
    return None
