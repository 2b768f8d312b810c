"""Compare the answers to a probe with transformers' own, so that only correctly computed media are supported."""

from __future__ import annotations

import base64
import itertools
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.pictures.clips import Clip
from gym_fed.serving.pictures.decoding import Picture, read_picture
from gym_fed.serving.pictures.embedding import MediumEmbedder, whole_inputs
from gym_fed.serving.pictures.processor import Medium, PictureProcessor, ProcessedPicture

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.multi_variant import MultiVariantModel

_RATE, _SECONDS = 16_000, 0.5
_SIDES = (56, 40)
_CLOSE = {"float32": 1e-3, "bfloat16": 0.3}
"""Tolerance of the logits' relative norm; rounding to bfloat16 alone moves them by up to 0.15."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A medium between texts, with the logits of transformers' own forward pass after its last two tokens."""

    kind: str
    processed: ProcessedPicture
    before: list[int]
    behind: list[int]
    expected: Tensor

    @classmethod
    def of(cls, model: Any, processor: PictureProcessor, kind: str) -> Probe:
        """Compute the expected logits, before the model's attention is replaced."""
        import torch

        from gym_fed.serving.forward.trial import tokens

        medium = _medium(kind)
        processed = processor.process(medium)
        if isinstance(medium, Picture):
            processor.check_numbers(medium)
        words = tokens(len(model.get_input_embeddings().weight))
        before, behind = [*words[:2], *processed.before], [*processed.behind, *words[2:]]
        with torch.inference_mode():
            logits = model(**whole_inputs(model, processed, before, behind), use_cache=False).logits[0, -2:]
        return cls(kind, processed, before, behind, logits.float())

    def why_not(self, served: MultiVariantModel, embedder: MediumEmbedder) -> str:
        """Return why the served model cannot read media of this kind; empty if it can."""
        import torch

        from gym_fed.serving.forward.chunk import Chunk, PlacedPicture, positions_between, rows_between
        from gym_fed.serving.forward.trial import distance

        try:
            embedded = embedder.embed(self.processed)
            run = self.processed.run
            placed = (PlacedPicture(len(self.before), len(run), embedded, b""),)
            ids = [*self.before, *run, *self.behind]
            cache, logits = served.new_cache(), []
            cuts = [0, len(self.before) + len(run) // 2, len(ids) - 1, len(ids)]
            for start, stop in itertools.pairwise(cuts):
                part = rows_between(placed, start, stop)
                places = positions_between(placed, start, stop)
                chunk = Chunk(ids[start:stop], cache, pictures=part, positions=places)
                logits.append(served.step([chunk])[0])
        except Exception as error:  # noqa: BLE001 (each model raises its own; its text is served all the same)
            return error.message if isinstance(error, GymError) else f"it fails with {str(error)[:200]}"
        off = distance(torch.stack(logits[1:]), self.expected.to(logits[0].device))
        if off <= _CLOSE.get(served.layout.dtype, _CLOSE["bfloat16"]):
            return ""
        return f"after a probe, its logits are off by {off:.1e} of their norm from those of transformers"


def _medium(kind: str) -> Medium:
    if kind == "image":
        return read_picture(_picture_url())
    if kind == "audio":
        count = int(_RATE * _SECONDS)
        samples = [int(8000 * math.sin(at / 9) + 4000 * math.sin(at / 3.7)) for at in range(count)]
        data = struct.pack(f"<{count}h", *samples)
        head = struct.pack(
            "<4sI4s4sIHHII", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, _RATE, 2 * _RATE
        )
        return Clip("audio", head + struct.pack("<HH4sI", 2, 16, b"data", len(data)) + data, b"probe")
    raise GymError(ErrorCode.USAGE, f"no probe for the kind {kind}", "probe images or audio")


def _picture_url() -> str:
    from io import BytesIO

    from PIL import Image

    width, height = _SIDES
    pixels = bytes((7 * at * at + at // 5) % 256 for at in range(3 * width * height))
    file = BytesIO()
    Image.frombytes("RGB", _SIDES, pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
