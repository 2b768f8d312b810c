"""Build the processor of a model type around the tiny tokenizer, if its image processor runs on this machine."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

_TOKENS = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "image_break_token": "<break>",
    "image_end_token": "<end>",
    "image_wrapper_token": "<wrap>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "video_start_token": "<video_start>",
    "video_end_token": "<video_end>",
    "image_start_token": "<image_start>",
    "image_thumbnail_token": "<thumbnail>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "eof_token": "<eof>",
    "eor_token": "<eor>",
    "eol_token": "<eol>",
    "audio_bos_token": "<audio_bos>",
    "audio_eos_token": "<audio_eos>",
    "vision_bos_token": "<vision_bos>",
    "vision_eos_token": "<vision_eos>",
    "image_wrapper": "<wrapper>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
"""Tokenizer attributes in which processors look up their placeholders, and the tokens for them."""
_LITERAL = ("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|image|>", "<|video|>", "<|audio|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ TEXT + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ TEXT + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
).replace(
    "TEXT",
    "(message['content'] if message['content'] is string else message['content'] | map(attribute='text') | join(''))",
)


def save_processor(model_type: str, tokenizer: Any, folder: Path) -> str:
    """Write the processor of a model type to a model folder; return why it cannot be built, or ``""``."""
    from gym_fed.base.modeling.processors import without_torchvision

    try:
        with without_torchvision():
            processor = _processor(model_type.removesuffix("_thinker"), tokenizer)
            processor.chat_template = _TEMPLATE
            processor.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001 (a result of the table)
        lines = str(error).strip().splitlines() or [""]
        return f"no processor can be built here: {lines[0] or type(error).__name__}"[:200]
    return ""


def _processor(model_type: str, tokenizer: Any) -> Any:
    import transformers
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    from gym_fed.base.modeling.processors import _PlaceholderLoader

    has_torchvision = importlib.util.find_spec("torchvision") is not None
    if model_type not in PROCESSOR_MAPPING_NAMES:
        raise ValueError(f"transformers lists none for {model_type}")
    made = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    tokenizer.add_special_tokens({"additional_special_tokens": [*_TOKENS.values(), *_LITERAL]})
    tokenizer._set_model_specific_special_tokens(_TOKENS)
    parts: dict[str, Any] = {}
    for name in inspect.signature(made.__init__).parameters:
        if name == "tokenizer":
            parts[name] = tokenizer
        elif name == "image_processor":
            images = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or IMAGE_PROCESSOR_MAPPING_NAMES.get(
                model_type.removesuffix("_moe"), {}
            )
            if "pil" not in images and not has_torchvision:
                raise ValueError("its image processor needs torchvision")
            parts[name] = getattr(transformers, images.get("pil") or images["torchvision"])()
        elif name == "video_processor" and has_torchvision:
            parts[name] = getattr(transformers, VIDEO_PROCESSOR_MAPPING_NAMES[model_type]["torchvision"])()
        elif name == "video_processor":
            parts[name] = _PlaceholderLoader.from_pretrained("")
        elif name in ("feature_extractor", "audio_processor"):
            parts[name] = getattr(transformers, FEATURE_EXTRACTOR_MAPPING_NAMES[model_type])()
        elif name in ("image_seq_length", "image_seq_len", "num_image_tokens"):
            parts[name] = 1
        elif name == "patch_size":
            parts[name] = 8
    return made(**parts)
