"""The parts of a model that reads images or sound (tower, projector, language model), by transformers' module names.

In some models (Qwen, GLM) the projector is inside the tower. Training freezes parts, and serving refuses variants of
the first two.
"""

from __future__ import annotations

TOWER, PROJECTOR = "freeze_vision_tower", "freeze_multi_modal_projector"
LANGUAGE_MODEL = "freeze_language_model"
PART_NAMES = {
    TOWER: (
        *("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens"),
        *("image_tower", "video_tower", "audio_tower", "embed_tokens_extend"),
    ),
    PROJECTOR: (
        *("multi_modal_projector", "mm_projector", "projector", "merger", "connector", "aligner", "mlp_AR"),
        *("embed_vision", "embed_audio", "vision_adapter", "perceiver_resampler"),
        *("qformer", "query_tokens", "language_projection", "image_to_text_projection", "image_newline"),
        *("vision_projection", "visual_projection", "visual_embeddings_table"),
    ),
    LANGUAGE_MODEL: ("language_model", "text_model", "lm_head"),
}
"""Names of modules and of weights without a module, by the config key that freezes the part."""
_IN_TOWER = ("merger", "patch_merger", "connector")
"""Names of projectors inside the tower."""
_ROOTS = ("base_model", "model")


def part_of(name: str) -> str | None:
    """Return the key of the part that a module or weight belongs to, by its full name; None if it belongs to none.

    PEFT's prefixes and infixes (``base_model.model``, ``base_layer``) are ignored.
    """
    words = name.split(".")
    if next((word for word in words if word not in _ROOTS), "") == "encoder":  # Granite Speech's
        return TOWER
    for index, word in enumerate(words):
        for key, names in PART_NAMES.items():
            if word in names:
                in_tower = key == TOWER and any(part in words[index:] for part in _IN_TOWER)
                return PROJECTOR if in_tower else key
    return None
