"""Fine-tune vision-language models on conversations with images, with TRL's collator.

A row is ``{"messages": [...], "images": [path, ...]}``. The position of an image is ``<image>`` in a text, or a
part ``{"type": "image"}``. Images are read from disk batch by batch. Rows are never packed. A row longer than
``max_length`` is truncated only after its last image, since the tokens of an image cannot be split.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.config_checks import images_type
from gym_fed.base.modeling.processors import is_processor as is_processor
from gym_fed.base.modeling.processors import is_vision_model
from gym_fed.base.models import resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first, refuse_set
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.data.chat_templates.rendering import vision_template
from gym_fed.data.encoding import require_chat_template
from gym_fed.data.row_counts import IGNORED, EncodedRows, RowCounts, teaches
from gym_fed.data.rows import Row, place_of

_PLACE = "<image>"


def check_vision_keys(config: TrainingConfig) -> None:
    """Check the model's files by ``require_model_of_text`` and ``require_image_model``, before it is loaded.

    Raises:
        GymError: ``CONFIG_INVALID``; see ``resolve`` for a model that is not on this machine.
    """
    require_model_of_text(config)
    algorithm = ALGORITHMS.type_of(config.algorithm)
    reads = algorithm.reads_images and config.model is not None and is_vision_model(config.model)
    require_image_model(config, reads_images=reads)


def require_model_of_text(config: TrainingConfig) -> None:
    """Refuse a model without a text-only class in transformers, if the algorithm cannot train on images.

    Raises:
        GymError: ``CONFIG_INVALID``; see ``resolve`` for a model that is not on this machine.
    """
    if config.model is None or ALGORITHMS.type_of(config.algorithm).reads_images:
        return
    kind = images_type(Path(resolve(config.model)))
    reason = f"model: {config.model} is a {kind} model, which reads images, and {config.algorithm} trains only on text"
    remedy = "train it with sft, the only algorithm that takes images, or give a text-only model"
    refuse_first((kind is not None, reason, remedy))


def require_image_model(config: TrainingConfig, *, reads_images: bool) -> None:
    """Refuse image sizes for a model that reads no images."""
    if not reads_images:
        keys, reason = ("image_max_pixels", "image_min_pixels"), f"{config.algorithm} gets only text here"
        refuse_set(config, keys, reason, "remove it, or train a model that reads images by sft")


def require_no_images(rows: Sequence[Row], algorithm: str | None = None) -> None:
    """Refuse rows with images, which a text-only model or the given ``algorithm`` would ignore."""
    remedy = "use sft, the only algorithm that takes images" if algorithm else "use a vision-language model"
    for number, row in enumerate(rows, start=1):
        if row.get("images"):
            raise _bad(
                number,
                f"has images, and {algorithm or 'the model'} reads only text",
                f"{remedy}, or drop them",
            )


def encode_image_rows(
    config: TrainingConfig, processor: Any, rows: Sequence[Row], *, assistant_only: bool, packing: bool
) -> EncodedRows:
    """Return rows for the collator: ``messages`` (JSON, with parts in place), ``images`` (sources), ``length``.

    ``ImageBatches`` truncates rows to ``max_length``; rows with nothing to learn within it are left out. The ``counts``
    of the result include all rows, and the tokens with a label.

    Raises:
        GymError: ``CONFIG_INVALID`` for packing; ``DATA_INVALID`` for a row whose images do not match its text, cannot
            be read or exceed ``max_length``, for a template in which the assistant's words cannot be located, and if
            no row is left to learn from.
    """
    refuse_first((packing, "packing: rows with images cannot be joined", "set packing: false"))
    require_chat_template(processor)
    template = vision_template(processor) if assistant_only else None
    counts, encoded, too_long = RowCounts(), [], _TooLong(config.max_length)
    for number, row in enumerate(rows, start=1):
        if "messages" not in row:
            raise _bad(number, "is not a conversation", "models that read images train on messages")
        _require_whole_answers(config, row, number)
        images = [_source(image, number) for image in row.get("images") or ()]
        messages = place_images(row["messages"], len(images), number)
        sizes = _picture_tokens(processor, images, number, ImageLimits.of(config))
        labels, last = _labels(processor, messages, sizes, template, assistant_only)
        if last >= config.max_length:
            too_long.add(row, number, last + 1)
            continue
        cut = labels[: config.max_length]
        counts.add(labels, cut)
        if teaches(cut):
            encoded.append({"messages": json.dumps(messages), "images": images, "length": len(cut)})
    too_long.refuse()
    if not encoded:
        raise counts.nothing_learned(config.max_length)
    return EncodedRows(encoded, counts)


@dataclass(frozen=True)
class ImageLimits:
    """The minimum and maximum pixels (width times height) of images; None leaves it to the processor."""

    least: int | None = None
    most: int | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> ImageLimits:
        """Return the limits of a config."""
        return cls(config.image_min_pixels, config.image_max_pixels)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height within the limits, rounded down to whole pixels, at least one each."""
        if self.most is not None and width * height > self.most:
            return _scaled(width, height, self.most)
        if self.least is not None and width * height < self.least:
            return _scaled(width, height, self.least)
        return width, height

    def fit(self, image: Any) -> Any:
        """Return a ``PIL.Image`` within the limits; the same object if no change is needed."""
        target = self.size(*image.size)
        return image if target == image.size else image.resize(target)


def _scaled(width: int, height: int, pixels: int) -> tuple[int, int]:
    factor = math.sqrt(pixels / (width * height))
    return max(1, int(width * factor)), max(1, int(height * factor))


class _TooLong:
    """Counts rows whose images exceed ``max_length``; ``refuse`` names the first."""

    def __init__(self, max_length: int) -> None:
        self._max_length, self._count, self._longest, self._first = max_length, 0, 0, ""

    def add(self, row: Row, number: int, length: int) -> None:
        self._count, self._longest = self._count + 1, max(self._longest, length)
        self._first = (
            self._first
            or f"{place_of(row, number)} has {counted(length, 'token')} up to the end of its images"
        )

    def refuse(self) -> None:
        if not self._count:
            return
        more = f"; {self._count} rows have this problem" if self._count > 1 else ""
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{self._first}, and max_length is {self._max_length}{more}",
            f"raise max_length (they need {self._longest}, and room for an answer), or set image_max_pixels lower; "
            "images are not cut",
        )


def _require_whole_answers(config: TrainingConfig, row: Row, number: int) -> None:
    """Refuse settings and rows that label only a part of the answers, which the collator cannot do."""
    reason = "mask_history: models that read images learn every answer of a conversation"
    refuse_first((config.mask_history, reason, "remove it, or end each conversation with its first answer"))
    messages = row["messages"]
    refuse_first(
        (row.get("tools"), "has tools"),
        (any(_is_weighted(message) for message in messages), "has a message with a weight"),
        ("train_on_eos" in row, "has train_on_eos"),
        (any(m.get("reasoning_content") or m.get("thinking") for m in messages), "has reasoning"),
        code=ErrorCode.DATA_INVALID,
        prefix=f"row {number} ",
        suffix=", which is not supported for models that read images",
        remedy="drop it from the row",
    )


def _is_weighted(message: dict[str, Any]) -> bool:
    """Return True if a message is learned otherwise than its role says, or in part."""
    default = 1 if message["role"] == "assistant" else None
    return message.get("weight", default) != default or "masked" in message


def place_images(messages: list[dict[str, Any]], count: int, number: int) -> list[dict[str, Any]]:
    """Replace each ``<image>`` in ``messages`` by an image part; without any, images precede the first question.

    Raises:
        GymError: ``DATA_INVALID`` naming row ``number`` if placeholders and images differ in number.
    """
    if not count:
        return messages
    placed = [{**message, "content": _parts(message.get("content"))} for message in messages]
    places = sum(part["type"] == "image" for message in placed for part in message["content"])
    first = next((message for message in placed if message["role"] == "user"), None)
    if places == 0 and first is not None:
        first["content"] = [{"type": "image"}] * count + first["content"]
    elif places != count:
        raise _bad(
            number,
            f"has {counted(count, 'image')} and {places} places for them",
            "write <image> once for each",
        )
    return placed


def _parts(content: Any) -> list[dict[str, Any]]:
    """Split a text, or parts whose texts may contain ``<image>``, into text parts and image parts."""
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
        if part["type"] != "text":
            parts.append({"type": "image"})
            continue
        for index, text in enumerate(part["text"].split(_PLACE)):
            parts += [{"type": "image"}] * (index > 0)
            parts += [{"type": "text", "text": text}] * bool(text)
    return parts


def _source(image: Any, number: int) -> str:
    """Return a path or a data URL; other forms of an image are converted to one of them."""
    if isinstance(image, dict):
        if image.get("bytes"):
            return "data:image/unknown;base64," + base64.b64encode(image["bytes"]).decode()
        image = image.get("path")
    if isinstance(image, Path):
        image = str(image)
    if not isinstance(image, str):
        raise _bad(number, f"has an image that is {type(image).__name__}", "give paths of image files")
    if "://" in image.split(",")[0]:
        raise _bad(number, f"has an image on the network: {image}", "save it, and give its path")
    return image if image.startswith("data:") else str(Path(image).expanduser())


def _labels(
    processor: Any,
    messages: list[dict[str, Any]],
    sizes: list[int],
    template: str | None,
    assistant_only: bool,
) -> tuple[list[int], int]:
    """Return the collator's labels of a row, and the position of the last image token; -1 for none.

    If the image token of the processor is not found once per image, the images are counted at the end of the row.

    Args:
        processor: The model's processor.
        messages: Messages that contain their image parts.
        sizes: Number of tokens of each image.
        template: Chat template that marks the assistant's words; None for the processor's own.
        assistant_only: Label only the assistant's words.
    """
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    out = processor.tokenizer.apply_chat_template(
        parts,
        chat_template=template or _own_template(processor),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=assistant_only,
    )
    ids: list[int] = out["input_ids"]
    learned = out["assistant_masks"] if assistant_only else [1] * len(ids)
    labels = [token if learn else IGNORED for token, learn in zip(ids, learned, strict=True)]
    if not sizes:
        return labels, -1
    mark = processor.tokenizer.convert_tokens_to_ids(_image_mark(processor))
    if ids.count(mark) != len(sizes):
        whole = labels + [IGNORED] * (sum(sizes) - len(sizes))
        return whole, len(whole) - 1
    left, last, whole = iter(sizes), -1, []
    for token, label in zip(ids, labels, strict=True):
        whole += [label] * (next(left) if token == mark else 1)
        last = len(whole) - 1 if token == mark else last
    return whole, last


def _own_template(processor: Any) -> str:
    own = processor.chat_template
    return str(own["default"] if isinstance(own, dict) else own)


def _image_mark(processor: Any) -> str | None:
    """Return the token that represents an image before the processor expands it."""
    framed = getattr(processor, "full_image_sequence", None)
    mark: str | None = getattr(processor, "boi_token" if framed else "image_token", None)
    return mark


def _picture_tokens(processor: Any, images: list[str], number: int, limits: ImageLimits) -> list[int]:
    """Return the number of tokens of each of a row's images, including those that frame it."""
    sizes = [limits.size(*_size(image, number))[::-1] for image in images]
    if not sizes:
        return []
    if framed := getattr(processor, "full_image_sequence", None):  # Gemma's images all have one size
        return [len(processor.tokenizer(framed, add_special_tokens=False)["input_ids"])] * len(sizes)
    return list(processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])


def _size(source: str, number: int) -> tuple[int, int]:
    """Return width and height, reading only the header of a file."""
    from PIL import Image, UnidentifiedImageError
    from transformers.image_utils import load_image

    try:
        if source.startswith("data:"):
            width, height = load_image(source).size
        else:
            with Image.open(source) as image:
                width, height = image.size
    except (OSError, ValueError, UnidentifiedImageError) as error:
        shown = source if len(source) < 200 else source[:60] + "..."
        reason = f"has an image that cannot be read: {shown}"
        raise _bad(number, reason, "give a PNG, JPEG or WebP file") from error
    return width, height


def _bad(number: int, problem: str, remedy: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"row {number} {problem}", remedy)
