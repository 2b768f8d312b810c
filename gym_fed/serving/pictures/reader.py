"""Read a request's pictures, audio clips and videos, expand them to tokens, and compute their features."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.config_checks import images_type
from gym_fed.base.modeling.processors import load_processor
from gym_fed.base.models import resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.openai.content_types import AudioPart, ImagePart, TextPart, VideoPart
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.schemas import Message, UserMessage
from gym_fed.serving.pictures.clips import read_clip_of_sound, read_clip_of_video, require_wanted
from gym_fed.serving.pictures.decoding import MAX_REQUEST_PIXELS, Picture, read_picture, require_limits
from gym_fed.serving.pictures.embedding import MediumEmbedder, PictureEncoder
from gym_fed.serving.pictures.processor import NOUNS, Medium, PictureProcessor, ProcessedPicture
from gym_fed.serving.pictures.trial import Probe

if TYPE_CHECKING:
    from gym_fed.serving.forward.chunk import PlacedPicture
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

_log = logging.getLogger(__name__)
_KINDS = ("image_url", "input_image", "input_audio", "video_url")
MediumPart = ImagePart | AudioPart | VideoPart

_REFUSAL = (
    "content parts of type {type!r} are not supported by this server, only {reads}. {why}: {remedy}, or "
    "serve a model that reads {noun}s"
)
_REMEDIES = {
    "image": "describe the image in words",
    "audio": "write what is said as text",
    "video": "describe the video in words",
}


class MessagePictures:
    """The pictures of one request.

    Raises:
        RequestError: For a picture that is refused by its header, and for any picture if the model reads none.
    """

    def __init__(self, messages: Sequence[Message], reader: PictureReader | NoPictures) -> None:
        self._reader = reader
        self._read: dict[int, tuple[Medium, str, str]] = {}
        self._processed: dict[bytes, ProcessedPicture] = {}
        self._pixels = 0
        for place, part in _parts(messages):
            kind = _kind(part)
            if (why := reader.why_not(kind)) is not None:
                problem = _REFUSAL.format(
                    type=part.type, reads=reader.reads, why=why, remedy=_REMEDIES[kind], noun=NOUNS[kind]
                )
                raise RequestError(f"field {place!r}: {problem}", param=place, name="unsupported_parameter")
            assert isinstance(reader, PictureReader)
            place = f"{place}.{part.type}"
            with _refusals(place, kind):
                medium = _read(part)
                if isinstance(medium, Picture):
                    reader.processor.require_detail(medium)
            self._read[id(part)] = medium, place, kind
            self._pixels += medium.pixels
            with _refusals("messages", kind):  # checked before the next one is read
                require_limits(len(self._read), self._pixels)

    def __len__(self) -> int:
        return len(self._read)

    def expand(
        self, ids: list[int], messages: Sequence[Message], context: int | None = None
    ) -> ExpandedPrompt:
        """Expand the rendered prompt of some of the messages to the tokens of their media.

        Args:
            ids: The rendered prompt, with one placeholder for each medium.
            messages: The messages.
            context: Maximum number of tokens of the prompt and the answer; if the prompt exceeds it, no further medium
                is read.

        Raises:
            RequestError: For a broken medium, a template that does not write a placeholder for each medium, or a prompt
                that is too long.
        """
        if isinstance(self._reader, NoPictures) or not self._read:
            return ExpandedPrompt(ids)
        reader = self._reader
        read = [self._read[id(part)] for _, part in _parts(messages)]
        processed: dict[str, list[tuple[Medium, ProcessedPicture]]] = {kind: [] for kind in NOUNS}
        length = len(ids)
        for medium, place, kind in read:
            processed[kind].append((medium, self._process(reader, medium, place, kind)))
            length += len(processed[kind][-1][1].run) - 1  # the run replaces the placeholder
            if context is not None and length >= context:
                raise RequestError(
                    f"the prompt has {counted(length, 'token')} or more including its media; together "
                    f"with the answer, at most {context:,} are allowed",
                    param="messages",
                    name="context_length_exceeded",
                    hint="send fewer images, audio clips or videos, or smaller ones",
                )
        if reader.processor.is_numbered and len(processed["image"]) > 1:
            raise RequestError(
                "this model numbers its images, so only one per request is supported",
                param="messages",
                hint="send one image in a request, or use transformers or vLLM",
            )
        for kind, media in processed.items():
            if (places := reader.places(ids, kind)) != len(media):
                raise RequestError(
                    f"this model's chat template has {places} placeholders for {counted(len(media), NOUNS[kind])}",
                    param="messages",
                    hint=f"start the server with a chat template that supports {NOUNS[kind]}s (chat_template)",
                )
        return reader.expand(ids, processed)

    def _process(self, reader: PictureReader, medium: Medium, place: str, kind: str) -> ProcessedPicture:
        processed = self._processed.get(medium.digest)
        if processed is None:
            require_wanted()
            with _refusals(place, kind):
                processed = reader.processor.process(medium, MAX_REQUEST_PIXELS - self._pixels)
            self._processed[medium.digest] = processed
            self._pixels += processed.pixels
        return processed


def count_pictures(body: Any) -> int:
    """Count the pictures of an unvalidated body; a ``previous_response_id`` counts as one, as it may have some."""
    if not isinstance(body, dict):
        return 0
    items = [item for name in ("messages", "input") for item in _listed(body.get(name))]
    contents = (part for item in items if isinstance(item, dict) for part in _listed(item.get("content")))
    kinds = (part.get("type") for part in contents if isinstance(part, dict))
    return (body.get("previous_response_id") is not None) + sum(kind in _KINDS for kind in kinds)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, MediumPart]]:
    """Yield every medium and its position, in order."""
    for index, message in enumerate(messages):
        if isinstance(message, UserMessage) and not isinstance(message.content, str):
            for number, part in enumerate(message.content):
                if not isinstance(part, TextPart):
                    yield f"messages[{index}].content[{number}]", part


def _kind(part: MediumPart) -> str:
    return {"image_url": "image", "input_audio": "audio", "video_url": "video"}[part.type]


def _read(part: MediumPart) -> Medium:
    """Read the header of a medium, without decoding it.

    Raises:
        GymError: ``USAGE`` for an invalid medium; ``TOO_LARGE`` above a limit.
    """
    if isinstance(part, AudioPart):
        return read_clip_of_sound(part.input_audio.data, part.input_audio.format)
    if isinstance(part, VideoPart):
        return read_clip_of_video(part.video_url.url)
    return read_picture(part.image_url.url, part.image_url.detail or "auto")


@contextmanager
def _refusals(place: str, kind: str) -> Iterator[None]:
    """Add the position and the kind of medium to errors raised in the block, since the request causes them."""
    try:
        yield
    except GymError as error:
        if error.code not in (ErrorCode.USAGE, ErrorCode.TOO_LARGE):
            raise
        raise RequestError(
            f"field {place!r}: {error.message}",
            param=place,
            name=f"{kind}_too_large" if error.code is ErrorCode.TOO_LARGE else f"invalid_{kind}",
            hint=error.hint,
        ) from error


@dataclass(frozen=True, eq=False)
class PictureRun:
    """A picture in a prompt, whose features may not be computed yet.

    Attributes:
        start: The first token of its run.
        picture: The picture.
        processed: Its tokens and input.
    """

    start: int
    picture: Medium
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
    """The stand-in for a ``PictureReader`` for models that do not support media.

    Attributes:
        why: The reason, for the refusal.
    """

    why: str = "The base of this server reads only text"
    reads = "text"

    def why_not(self, _kind: str) -> str | None:
        """Return why a kind of media is refused."""
        return self.why


class PictureReader:
    """Reads the pictures, audio clips and videos of one model's prompts. Thread-safe.

    Args:
        processor: The processor of the model.
        probes: A probe for each kind of medium, or the reason why there is none.
        embedder: Embeds media with the model.

    Attributes:
        encoder: Computes features; set by ``attach``.
    """

    encoder: PictureEncoder

    def __init__(
        self, processor: PictureProcessor, probes: dict[str, Probe | str], embedder: MediumEmbedder
    ) -> None:
        self.processor, self._probes, self._embedder = processor, probes, embedder
        self._reasons: dict[str, str] = {}

    @classmethod
    def open(cls, name: str, model: Any) -> PictureReader | NoPictures:
        """Open the reader of a loaded model; ``NoPictures`` for a text model.

        Args:
            name: The name or folder with its processor.
            model: The loaded model on its device, not yet served.

        Raises:
            GymError: See ``load_processor``.
        """
        if not hasattr(model.config, "get_text_config") or model.config.get_text_config() is model.config:
            # for some models, only the language model was loaded
            kind = images_type(Path(resolve(name)))
            return (
                NoPictures() if kind is None else NoPictures(f"Only the text of {kind} models is supported")
            )
        processor = PictureProcessor(load_processor(name))
        probes: dict[str, Probe | str] = {}
        for kind in processor.kinds:
            if kind != "image" and importlib.util.find_spec("av") is None:
                probes[kind] = "the package av is missing (pip install 'gym-fed[media]')"
                continue
            if kind == "video":  # supported like pictures
                continue
            try:
                probes[kind] = Probe.of(model, processor, kind)
            except Exception as error:  # noqa: BLE001 (each model raises its own; its text is still served)
                probes[kind] = f"transformers' own forward pass of a probe failed: {str(error)[:200]}"
        return cls(processor, probes, MediumEmbedder(model))

    def attach(self, served: MultiVariantModel) -> PictureReader | NoPictures:
        """Compare the answers to the probes, and start computing features; return ``NoPictures`` if no kind is right.

        Videos are supported if pictures are, since their frames are computed in the same way.
        """
        kind = served.model.config.model_type
        for name, probe in self._probes.items():
            why = probe if isinstance(probe, str) else probe.why_not(served, self._embedder)
            if why:
                self._reasons[name] = (
                    f"{NOUNS[name].capitalize()}s of this {kind} model are not supported: {why}"
                )
        if "video" in self.processor.kinds and "video" not in self._reasons:
            if "image" not in self.processor.kinds:
                self._reasons["video"] = (
                    f"Videos of this {kind} model are not supported: it reads no images to probe"
                )
            elif "image" in self._reasons:
                self._reasons["video"] = self._reasons["image"]
        for name, reason in self._reasons.items():
            _log.warning("%s", reason)
            self.processor.drop(name)
        if not self.processor.kinds:
            return NoPictures(
                next(iter(self._reasons.values()), f"Media are not supported for {kind} models")
            )
        self.encoder = PictureEncoder(self._embedder)
        return self

    @property
    def kinds(self) -> frozenset[str]:
        """The supported kinds of media."""
        return self.processor.kinds

    @property
    def reads(self) -> str:
        """The supported kinds of input, for messages."""
        return " and ".join(["text", *(f"{NOUNS[kind]}s" for kind in NOUNS if kind in self.kinds)])

    def why_not(self, kind: str) -> str | None:
        """Return why a kind of media is refused; None if it is supported."""
        if kind in self.kinds:
            return None
        return self._reasons.get(kind, f"This model's processor does not support {NOUNS[kind]}s")

    @property
    def chat_template(self) -> str | None:
        """The template of the processor, which may have one if the tokenizer has none."""
        template = self.processor.chat_template
        return template if isinstance(template, str) else None

    def places(self, ids: Sequence[int], kind: str) -> int:
        """Count the placeholders of a kind of media in a prompt."""
        return sum(self.processor.places.get(token) == kind for token in ids)

    def expand(
        self, ids: Sequence[int], media: Mapping[str, Sequence[tuple[Medium, ProcessedPicture]]]
    ) -> ExpandedPrompt:
        """Replace the placeholder of each medium in a prompt with the medium's tokens."""
        expanded: list[int] = []
        runs: list[PictureRun] = []
        remaining = {kind: iter(each) for kind, each in media.items()}
        for token in ids:
            if (kind := self.processor.places.get(token)) is None:
                expanded.append(token)
                continue
            medium, processed = next(remaining[kind])
            runs.append(PictureRun(len(expanded), medium, processed))
            expanded += processed.run
        return ExpandedPrompt(expanded, tuple(runs))

    def placed(self, prompt: ExpandedPrompt, owner: str) -> tuple[PlacedPicture, ...]:
        """Return the media of a prompt for the engine, computing features unless they are cached for the owner.

        Raises:
            GymError: See ``PictureEncoder.features`` and ``require_wanted``.
        """
        from gym_fed.serving.forward.chunk import PlacedPicture  # imports torch

        placed = []
        for run in prompt.runs:
            require_wanted()
            embedded = self.encoder.features(run.picture, run.processed, owner)
            placed.append(PlacedPicture(run.start, len(run.processed.run), embedded, run.picture.digest))
        return tuple(placed)
