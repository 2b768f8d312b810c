"""Tiny vision models of random weights, of the families that are served, with their own processors and templates."""

from __future__ import annotations

import base64
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from gym_fed.base.modeling import processors
from gym_fed.base.models import load_tokenizer

PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'PLACE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As the families' own: contents are lists of parts."""
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "initializer_range": 0.2,
}


def _tokenizer(*tokens: str, **names: str) -> Any:
    tokenizer = load_tokenizer("gym-nano")
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    for key, token in names.items():
        setattr(tokenizer, key, token)
    return tokenizer


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _llava(changes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = _tokenizer("<image>")
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=PARTS.replace("PLACE", "<image>"),
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT, **_ends(tokenizer), **changes),
        vision_config=CLIPVisionConfig(**{**VISION, "image_size": 32}),
        image_token_index=processor.image_token_id,
    )
    return LlavaForConditionalGeneration(config), processor


def _llava_next(changes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        CLIPVisionConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
        MistralConfig,
    )

    tokenizer = _tokenizer("<image>")
    grid = [[16, 32], [32, 16], [32, 32]]
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 16},
            crop_size={"height": 16, "width": 16},
            image_grid_pinpoints=grid,
        ),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=PARTS.replace("PLACE", "<image>"),
    )
    config = LlavaNextConfig(
        text_config=MistralConfig(**TEXT, **_ends(tokenizer), **changes, sliding_window=None),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=grid,
    )
    return LlavaNextForConditionalGeneration(config), processor


_IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
)


def _idefics3(changes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    tokenizer = _tokenizer(*_IDEFICS_TOKENS)
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer,
        image_seq_len=1,
        chat_template=PARTS.replace("PLACE", "<image>"),
    )
    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT, **_ends(tokenizer), **changes),
        vision_config={**VISION, "model_type": "idefics3_vision"},
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    return Idefics3ForConditionalGeneration(config), processor


def _smolvlm(changes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        LlamaConfig,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        SmolVLMImageProcessorPil,
        SmolVLMProcessor,
    )

    tokenizer = _tokenizer(*_IDEFICS_TOKENS, "<video>")
    processor = SmolVLMProcessor(
        SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer,
        _no_films(),
        image_seq_len=1,
        chat_template=PARTS.replace("PLACE", "<image>"),
    )
    config = SmolVLMConfig(
        text_config=LlamaConfig(**TEXT, **_ends(tokenizer), **changes),
        vision_config={**VISION, "model_type": "smolvlm_vision"},
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    return SmolVLMForConditionalGeneration(config), processor


def _internvl(changes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        GotOcr2ImageProcessorPil,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVisionConfig,
        Qwen2Config,
    )

    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = _tokenizer(*names.values())
    tokenizer._set_model_specific_special_tokens(names)
    processor = InternVLProcessor(
        GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4),
        tokenizer,
        _no_films(),
        image_seq_length=1,
        chat_template=PARTS.replace("PLACE", "<IMG_CONTEXT>"),
    )
    vision = InternVLVisionConfig(**{**VISION, "image_size": [16, 16], "patch_size": [8, 8]})
    config = InternVLConfig(
        text_config=Qwen2Config(**TEXT, **_ends(tokenizer), **changes),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=1,
    )
    return InternVLForConditionalGeneration(config), processor


def _mistral3(changes: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralImageProcessorPil,
        PixtralProcessor,
        PixtralVisionConfig,
    )

    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    processor = PixtralProcessor(
        PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=8),
        tokenizer,
        patch_size=8,
        spatial_merge_size=2,
        chat_template=PARTS.replace("PLACE", "[IMG]"),
    )
    config = Mistral3Config(
        text_config=MistralConfig(**TEXT, **_ends(tokenizer), **changes, head_dim=8, sliding_window=None),
        vision_config=PixtralVisionConfig(**{**VISION, "image_size": 64}),
        image_token_index=processor.image_token_id,
        spatial_merge_size=2,
    )
    return Mistral3ForConditionalGeneration(config), processor


def _no_films() -> Any:
    """What stands in for a processor of films where torchvision is missing; only within ``without_torchvision``."""
    return processors._PlaceholderLoader.from_pretrained("")


MAKERS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "mistral3": _mistral3,
}


def vision_model(family: str, folder: Path, **text: Any) -> Path:
    """A model of this family in a folder; ``text`` changes the config of its language model."""
    torch.manual_seed(0)
    with processors.without_torchvision():
        model, processor = MAKERS[family](text)
    with torch.no_grad():  # so that greedy answers are not all of one token
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def drawn(seed: int, width: int = 32, height: int = 32) -> Any:
    """A picture of random pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def data_url(picture: Any, kind: str = "png", **how: Any) -> str:
    """As the openai client's callers send it."""
    data = BytesIO()
    picture.save(data, kind, **how)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def image_part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def expected(
    folder: Path, rows: list[dict[str, Any]], pictures: list[Any] | None, tokens: int, **how: Any
) -> Any:
    """What transformers makes of a conversation: its prompt's ids, and the greedy answer's.

    Args:
        folder: The model's.
        rows: Contents are lists of parts, ``{"type": "image"}`` among them.
        pictures: In their order.
        tokens: Of the answer.
        how: ``model``: in place of the folder's. Else settings of the processor.
    """
    from transformers import AutoModelForImageTextToText

    from gym_fed.base.modeling.processors import load_processor

    model = how.pop("model", None) or AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = load_processor(str(folder))
    text = processor.tokenizer.apply_chat_template(
        rows, tokenize=False, add_generation_prompt=True, chat_template=processor.chat_template
    )
    made = processor(text=text, images=pictures, add_special_tokens=False, return_tensors="pt", **how)
    inputs = {key: value for key, value in made.items() if "token_type" not in key}
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0].tolist()
    length = inputs["input_ids"].shape[1]
    return found[:length], found[length:]
