"""Encode conversations with images, sound and video for models that read them.

A row is ``{"messages": [...], "images": [path, ...]}``, with ``audios`` and ``videos`` in the same form. The position
of a medium is given by ``<image>``, ``<audio>`` or ``<video>`` in a text, or by a part such as ``{"type": "image"}``.
Media are read from disk batch by batch, and rows are never packed. A row longer than ``max_length`` is truncated only
after its last medium, since the tokens of a medium cannot be split.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.config_checks import images_type
from gym_fed.base.modeling.processors import is_processor as is_processor
from gym_fed.base.modeling.processors import is_vision_model
from gym_fed.base.models import resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError, refuse_first, refuse_set
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted
from gym_fed.data.chat_templates.batches import render_rows
from gym_fed.data.chat_templates.conversation import ChatRenderer, RenderedConversation
from gym_fed.data.chat_templates.parts import takes_parts
from gym_fed.data.encoding import require_chat_template
from gym_fed.data.row_counts import EncodedRows, RowCounts, teaches
from gym_fed.data.rows import MEDIA, Row, place_of
from gym_fed.training.vision.labels import batch_labels, span_labels
from gym_fed.training.vision.media import ImageLimits, MediaCounts, MediaProcessor, bad_medium, source_of


def check_vision_keys(config: TrainingConfig) -> None:
    """Apply ``require_model_of_text`` and ``require_image_model`` before the model is loaded.

    Raises:
        GymError: ``CONFIG_INVALID``; see ``resolve`` for a model that is not on this machine.
    """
    require_model_of_text(config)
    algorithm = ALGORITHMS.type_of(config.algorithm)
    reads = algorithm.reads_images and config.model is not None and is_vision_model(config.model)
    require_image_model(config, reads_images=reads)


def require_model_of_text(config: TrainingConfig) -> None:
    """Refuse a model without a text-only class in transformers if the algorithm cannot train on images.

    Raises:
        GymError: ``CONFIG_INVALID``; see ``resolve`` for a model that is not on this machine.
    """
    if config.model is None or ALGORITHMS.type_of(config.algorithm).reads_images:
        return
    kind = images_type(Path(resolve(config.model)))
    reads = f"{config.model} is a {kind} model, which reads images or audio"
    reason = f"model: {reads}, and {config.algorithm} trains only on text"
    remedy = f"train it with {' or '.join(_readers())}, or use a text-only model"
    refuse_first((kind is not None, reason, remedy))


def _readers() -> list[str]:
    return [name for name in ALGORITHMS.own() if ALGORITHMS.type_of(name).reads_images]


def require_image_model(config: TrainingConfig, *, reads_images: bool) -> None:
    """Refuse image sizes for a model that does not read images."""
    if not reads_images:
        keys, reason = (
            ("image_max_pixels", "image_min_pixels"),
            f"this run of {config.algorithm} reads only text",
        )
        refuse_set(config, keys, reason, "remove it, or train a model that reads images with sft")


def without_media(
    rows: Iterable[Row], reads: frozenset[str] = frozenset(), algorithm: str | None = None
) -> Iterator[Row]:
    """Yield the rows. At the first row with media that would be ignored, count all such rows and refuse them.

    Args:
        rows: The rows.
        reads: The columns of media that are read.
        algorithm: The algorithm, if the media would be ignored because of it rather than because of the model.
    """
    columns = [column for column in MEDIA if column not in reads]
    numbered = enumerate(rows, start=1)
    for number, row in numbered:
        if ignored := Counter(column for column in columns if row.get(column)):
            place, first = place_of(row, number), next(iter(ignored))
            break
        yield row
    else:
        return
    for number, row in numbered:  # noqa: B007 - the last number is the number of rows
        ignored.update(column for column in columns if row.get(column))
    many = ", ".join(f"{count} with {name}" for name, count in sorted(ignored.items()))
    more = f"; of {counted(number, 'row')}: {many}" if ignored.total() > 1 else ""
    reader = algorithm or "the model"
    remedy = f"use {' or '.join(_readers())}" if algorithm else f"use a model that reads {first}"
    raise GymError(
        ErrorCode.DATA_INVALID,
        f"{place} has {first}, but {reader} reads only {' and '.join(['text', *sorted(reads)])}{more}",
        f"{remedy}, or drop such rows",
    )


def encode_media_rows(
    config: TrainingConfig, processor: Any, rows: Sequence[Row], *, assistant_only: bool, packing: bool
) -> EncodedRows:
    """Return rows for ``MediaBatches``: ``row`` (JSON with text, learned spans and sources of media) and ``length``.

    ``MediaBatches`` truncates rows to ``max_length``; rows without a label within it are dropped. The ``counts`` of the
    result include all rows, and the tokens with a label.

    Raises:
        GymError: ``CONFIG_INVALID`` for packing; ``DATA_INVALID`` for a row whose media do not match its text, cannot
            be read or exceed ``max_length``, for a template in which the assistant's text cannot be located, or if no
            row is left to learn from.
    """
    refuse_first((packing, "packing: rows with media cannot be packed", "set packing: false"))
    reader = RowReader(config, processor)
    counts, encoded, too_long = RowCounts(), [], TooLong(config.max_length)
    require_conversations(rows)
    for number, row in enumerate(rows, start=1):
        refuse_first(
            (
                any("masked" in message for message in row["messages"]),
                "has parts that are not trained on",
                "train on the whole turn, or drop the row",
            ),
            ("train_on_eos" in row, "has train_on_eos", "remove it from the data source"),
            code=ErrorCode.DATA_INVALID,
            prefix=f"{place_of(row, number)} ",
            suffix=", which is not supported for models that read images or audio",
        )
        if row.get("videos") and "videos" not in reader.media.kinds and hasattr(processor, "video_processor"):
            subject = f"{place_of(row, number)}: reading its video"
            require_package("torchvision", subject, "vision")
    rows = list(without_media(rows, reader.media.kinds))
    reads = reader.read(rows, assistant_only)
    reader.require_mixable(reads, [place_of(row, number) for number, row in enumerate(rows, start=1)])
    for number, (row, read) in enumerate(zip(rows, reads, strict=True), start=1):
        labels, last = reader.labels(read, place_of(row, number))
        if last >= config.max_length:
            too_long.add(row, number, last + 1)
            continue
        cut = labels[: config.max_length]
        counts.add(labels, cut)
        if teaches(cut):
            encoded.append({"row": json.dumps(read), "length": len(cut)})
    too_long.refuse()
    if not encoded:
        raise counts.nothing_learned(config.max_length)
    report_media(reader.media.counts)
    return EncodedRows(encoded, counts)


def require_conversations(rows: Sequence[Row]) -> None:
    """Refuse rows that are neither conversations nor pairs of answers to a conversation.

    Raises:
        GymError: ``DATA_INVALID`` with the row.
    """
    for number, row in enumerate(rows, start=1):
        texts = (row.get(key, ()) for key in ("prompt", "chosen", "rejected"))
        if not row.keys() & {"messages", "chosen"} or any(isinstance(text, str) for text in texts):
            reason = f"{place_of(row, number)} is not a conversation"
            raise GymError(
                ErrorCode.DATA_INVALID, reason, "models that read images or audio train on messages"
            )


class RowReader:
    """Reads rows for a processor: renders their conversations and computes their labels.

    Args:
        config: The run's config.
        processor: The model's processor.

    Raises:
        GymError: ``DATA_INVALID`` for a processor without a chat template.
    """

    def __init__(self, config: TrainingConfig, processor: Any) -> None:
        require_chat_template(processor)
        self._config = config
        self.media = MediaProcessor(processor, ImageLimits.of(config))
        self._tokenizer = copy.copy(processor.tokenizer)
        self._tokenizer.chat_template = processor.chat_template
        self._takes_parts: dict[str, bool] = {}
        self._counts_images: bool | None = None if hasattr(processor, "_get_num_multimodal_tokens") else False

    def read(self, rows: Sequence[Row], assistant_only: bool) -> list[Row]:
        """Return the rendered text, the learned spans and the media sources of each row.

        Raises:
            GymError: ``DATA_INVALID`` for media that do not match the text; errors from ``ChatRenderer``.
        """
        placed, sources = [], []
        for number, row in enumerate(rows, start=1):
            place = place_of(row, number)
            media = {column: [source_of(m, column, place) for m in row.get(column) or ()] for column in MEDIA}
            messages = place_media(row["messages"], {column: len(media[column]) for column in MEDIA}, place)
            messages = [self._shaped(message, place) for message in messages]
            placed.append(({**{k: row[k] for k in ("tools",) if k in row}, "messages": messages}, place))
            sources.append(media)
        config = self._config
        renderer = ChatRenderer(self._tokenizer, assistant_only, config.mask_history, config.reasoning)
        conversations: list[RenderedConversation] = render_rows(renderer, placed)
        return [
            {"text": conversation.text, "spans": [list(span) for span in conversation.spans], **media}
            for conversation, media in zip(conversations, sources, strict=True)
        ]

    def require_mixable(self, reads: Sequence[Row], places: Sequence[str]) -> None:
        """Refuse a mix of rows with and without media if the processor rejects such batches (Audio Flamingo 3).

        Raises:
            GymError: ``DATA_INVALID`` with the processor's reason.
        """
        first = {any(read[column] for column in MEDIA): i for i, read in reversed([*enumerate(reads)])}
        if len(first) == 2:
            pair = sorted(first.values())
            self.media.inputs([reads[i] for i in pair], [f"{places[pair[0]]} and {places[pair[1]]}"] * 2)

    def labels(self, read: Row, place: str) -> tuple[list[int], int]:
        """Return the labels of a row in its batch, and the position of its last media token; -1 if there is none.

        If the processor can count the tokens of images, only the headers of images are read. The first row is also
        prepared in full, to verify the count; if it is wrong, the processor prepares every row.
        """
        if self._counts_images is False or read["audios"] or read["videos"]:
            return self._exact_labels(read, place)
        quick = self._quick_labels(read, place)
        if quick is not None and (self._counts_images or not read["images"]):
            return quick
        exact = self._exact_labels(read, place)
        self._counts_images = quick == exact
        return exact

    def _exact_labels(self, read: Row, place: str) -> tuple[list[int], int]:
        batch = self.media.inputs([read], [place])
        (labels,), (last,) = batch_labels(self._tokenizer, batch, [read], [place])
        return labels, last

    def _quick_labels(self, read: Row, place: str) -> tuple[list[int], int] | None:
        processor = self.media.processor
        out = self._tokenizer(read["text"], add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = out["input_ids"]
        labels = span_labels(ids, out["offset_mapping"], read["spans"])
        if not read["images"]:
            return labels, -1
        sizes = [self.media.limits.size(*_size(source, place))[::-1] for source in read["images"]]
        counts = iter(processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])
        image_token = self._tokenizer.convert_tokens_to_ids(processor.image_token)
        if ids.count(image_token) != len(sizes):
            return None
        last, expanded = -1, []
        for token, label in zip(ids, labels, strict=True):
            expanded += [label] * (next(counts) if token == image_token else 1)
            last = len(expanded) - 1 if token == image_token else last
        return expanded, last

    def _shaped(self, message: Row, place: str) -> Row:
        """Return a message whose content is a list of parts or a text, as the template expects."""
        content, role = message.get("content"), message["role"]
        if content is None or content == "":
            return message
        if role not in self._takes_parts:
            self._takes_parts[role] = takes_parts(self._rendered, role)
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if self._takes_parts[role]:
            return {**message, "content": parts}
        if media := [part["type"] for part in parts if part["type"] != "text"]:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: the model's chat template does not support {media[0]} in a message with role {role}",
                "set chat_template to the template of the model's processor, or drop the row",
            )
        return {**message, "content": "".join(part["text"] for part in parts)}

    def _rendered(self, messages: list[Row]) -> str | None:
        try:
            renderer = ChatRenderer(self._tokenizer, assistant_only=False)
            return render_rows(renderer, [({"messages": messages}, "a probe")])[0].text
        except GymError as error:
            if error.code is not ErrorCode.DATA_INVALID:
                raise
            return None


class TooLong:
    """Counts the rows whose media exceed ``max_length``; ``refuse`` raises an error with the first one."""

    def __init__(self, max_length: int) -> None:
        self._max_length, self._count, self._longest, self._first = max_length, 0, 0, ""

    def add(self, row: Row, number: int, length: int) -> None:
        self._count, self._longest = self._count + 1, max(self._longest, length)
        media = ", ".join(column for column in MEDIA if row.get(column))
        place = place_of(row, number)
        self._first = self._first or f"{place} has {counted(length, 'token')} up to the end of its {media}"

    def refuse(self) -> None:
        if not self._count:
            return
        more = f"; {self._count} rows have this problem" if self._count > 1 else ""
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{self._first}, but max_length is {self._max_length}{more}",
            f"raise max_length (to {self._longest}, plus room for an answer), or lower image_max_pixels; media are not "
            "truncated",
        )


def place_media(messages: list[Row], counts: dict[str, int], place: str) -> list[Row]:
    """Replace each ``<image>``, ``<audio>`` and ``<video>`` in ``messages`` with a part.

    Media without a placeholder of their kind are placed before the first question.

    Args:
        messages: The messages of a row.
        counts: The number of media by column.
        place: The name of the row in error messages.

    Raises:
        GymError: ``DATA_INVALID`` if the numbers of placeholders and media differ.
    """
    placed = messages
    if kinds := [MEDIA[column] for column in MEDIA if counts.get(column)]:
        placed = [{**message, "content": _parts(message.get("content"), kinds)} for message in messages]
    contents = [message.get("content") for message in placed]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    first = next((message for message in placed if message["role"] == "user"), None)
    for column in reversed(MEDIA):
        name, count = MEDIA[column], counts.get(column, 0)
        places = sum(part["type"] == name for part in parts)
        if places == 0 and count and first is not None:
            first["content"] = [{"type": name}] * count + first["content"]
        elif places != count:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place} has {counted(count, name)} and {counted(places, 'placeholder')} for them",
                f"write <{name}> once for each",
            )
    return placed


def _parts(content: Any, kinds: Sequence[str]) -> list[Row]:
    """Split a text, or parts with texts, at placeholders into text parts and media parts."""
    parts: list[Row] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for kind in kinds:
        split: list[Row] = []
        for part in parts:
            if part["type"] != "text":
                split.append({"type": part["type"]})
                continue
            for index, text in enumerate(part["text"].split(f"<{kind}>")):
                split += [{"type": kind}] * (index > 0)
                split += [{"type": "text", "text": text}] * bool(text)
        parts = split
    return parts


def _size(source: str, place: str) -> tuple[int, int]:
    """Return the width and height of an image; only the header of a file is read."""
    from PIL import Image, UnidentifiedImageError
    from transformers.image_utils import load_image

    try:
        if source.startswith("data:"):
            width, height = load_image(source).size
        else:
            with Image.open(source) as image:
                width, height = image.size
    except (OSError, ValueError, UnidentifiedImageError) as error:
        raise bad_medium(place, "images", source, "cannot be read", "use a PNG, JPEG or WebP file") from error
    return width, height


def report_media(counts: MediaCounts) -> None:
    """Report the truncation of sounds and the sampling of video frames."""
    if counts.sounds_cut:
        console.err.print(
            f"audios: {counted(counts.sounds_cut, 'audio clip', 'are')} truncated to the model's maximum length"
        )
    if counts.videos:
        scaled = f"; {counted(counts.videos_scaled, 'video')} scaled down" if counts.videos_scaled else ""
        console.err.print(
            f"videos: {counts.frames_read:,} of {counted(counts.frames, 'frame', 'are')} read, as sampled by the "
            f"model's processor{scaled}"
        )
