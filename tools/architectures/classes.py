"""List the model classes of the installed transformers that generate text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MAPPINGS = {
    "text": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "image": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
    "sound": ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
}
"""The auto classes of transformers, by the input that their models read besides text."""


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers.

    Attributes:
        name: The name of the class.
        reads: ``text``, ``image`` or ``sound``.
        model_types: The model types that transformers loads with this class.
    """

    name: str
    reads: str
    model_types: tuple[str, ...]

    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.name)


def architectures() -> list[Architecture]:
    """Return every class once. A class in several tables is listed for its richest input."""
    from transformers.models.auto import modeling_auto

    reads: dict[str, str] = {}
    types: dict[str, list[str]] = {}
    for kind, mappings in _MAPPINGS.items():
        for mapping in mappings:
            for model_type, names in getattr(modeling_auto, mapping).items():
                for name in (names,) if isinstance(names, str) else names:
                    if reads.get(name) != "image":  # the last table also has the classes of images
                        reads[name] = kind
                    types.setdefault(name, []).append(model_type)
    order = list(_MAPPINGS)
    return [
        Architecture(name, reads[name], tuple(dict.fromkeys(types[name])))
        for name in sorted(reads, key=lambda name: (order.index(reads[name]), name.lower()))
    ]
