"""Siblings of models that read images. A picture of 28 x 28 pixels becomes four tokens, or one for the Qwen models."""

from __future__ import annotations

from typing import Any

from tests.support.siblings import templates
from tests.support.siblings.family import Ids, Sibling
from tests.support.siblings.text import GEMMA, QWEN
from tests.support.siblings.words import Words

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
LLAVA_WORDS = Words(
    "llama",
    "LlamaTokenizer",
    ("<unk>", "<s>", "</s>", "<image>", "<pad>"),
    eos="</s>",
    bos="<s>",
    pad="<pad>",
    unk="<unk>",
    adds_bos=True,
    settings=(("legacy", False), ("processor_class", "LlavaProcessor")),
)


def _llava(ids: Ids) -> dict[str, Any]:
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": ids["<image>"],
        "pad_token_id": ids["<pad>"],
        "projector_hidden_act": "gelu",
        "text_config": {
            **_TEXT,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "vocab_size": ids["vocab_size"],
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 24,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": ids["vocab_size"],
    }


def _gemma(ids: Ids) -> dict[str, Any]:
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 16,
            "vocab_size": ids["vocab_size"],
            "pad_token_id": ids["<pad>"],
            "bos_token_id": ids["<bos>"],
            "eos_token_id": ids["<eos>"],
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "image_size": 28,
            "patch_size": 7,
            "vision_use_head": False,
        },
    }


def _qwen_tokens(ids: Ids) -> dict[str, Any]:
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _qwen2_text(ids: Ids) -> dict[str, Any]:
    return {
        **_TEXT,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
        "vocab_size": ids["vocab_size"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def _qwen2_vl(ids: Ids) -> dict[str, Any]:
    vision = {
        **{"depth": 2, "embed_dim": 32, "hidden_size": 32, "in_chans": 3, "mlp_ratio": 2, "num_heads": 2},
        **{"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
    }
    names = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    return {**_qwen2_text(ids), **_qwen_tokens(ids), **names, "vision_config": vision}


def _qwen2_5_vl(ids: Ids) -> dict[str, Any]:
    vision = {
        **{"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "in_chans": 3, "intermediate_size": 64},
        **{"hidden_act": "silu", "num_heads": 2, "window_size": 112, "fullatt_block_indexes": [1]},
        **{"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
        **{"tokens_per_second": 2},
    }
    names = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    return {**_qwen2_text(ids), **_qwen_tokens(ids), **names, "vision_config": vision}


def _qwen3_vl(ids: Ids) -> dict[str, Any]:
    text = {
        **_qwen2_text(ids),
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "head_dim": 16,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
    }
    for key in ("use_sliding_window", "sliding_window", "max_window_layers"):
        del text[key]
    vision = {
        **{"model_type": "qwen3_vl", "depth": 3, "hidden_size": 32, "out_hidden_size": 32, "in_channels": 3},
        **{"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 64, "num_heads": 2, "patch_size": 14},
        **{"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "spatial_merge_size": 2},
        **{"temporal_patch_size": 2},
    }
    names = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    return {
        **names,
        **_qwen_tokens(ids),
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def _qwen_pictures(processor: str, image_processor: str) -> dict[str, Any]:
    return {
        **{
            "min_pixels": 784,
            "max_pixels": 3136,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        **{"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
        **{"image_processor_type": image_processor, "processor_class": processor},
    }


_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
VISION: dict[str, Sibling] = {
    "llava": Sibling(
        "llava-hf/llava-1.5-7b-hf",
        LLAVA_WORDS,
        templates.LLAVA,
        _llava,
        ("</s>",),
        {
            **{"crop_size": {"height": 28, "width": 28}, "size": {"shortest_edge": 28}, "resample": 3},
            **{"do_center_crop": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True},
            **{"do_resize": True, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
            **{"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"},
        },
        {
            **{"image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14},
            **{"processor_class": "LlavaProcessor", "vision_feature_select_strategy": "default"},
        },
        "float16",
    ),
    "gemma3_vision": Sibling(
        "google/gemma-3-4b-it",
        GEMMA,
        templates.shipped("gemma3"),
        _gemma,
        ("<eos>", "<end_of_turn>"),
        {
            **{"do_normalize": True, "do_rescale": True, "do_resize": True, "image_seq_length": 4},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2},
            **{"size": {"height": 28, "width": 28}, "image_processor_type": "Gemma3ImageProcessor"},
            "processor_class": "Gemma3Processor",
        },
        {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    ),
    "qwen2_vl": Sibling(
        "Qwen/Qwen2-VL-2B-Instruct",
        QWEN,
        templates.shipped("qwen2_5_vl"),  # the same text in both repositories
        _qwen2_vl,
        _QWEN_ENDS,
        _qwen_pictures("Qwen2VLProcessor", "Qwen2VLImageProcessor"),
    ),
    "qwen2_5_vl": Sibling(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        QWEN,
        templates.shipped("qwen2_5_vl"),
        _qwen2_5_vl,
        _QWEN_ENDS,
        _qwen_pictures("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
    ),
    "qwen3_vl": Sibling(
        "Qwen/Qwen3-VL-2B-Instruct",
        QWEN,
        templates.shipped("qwen3_vl"),
        _qwen3_vl,
        _QWEN_ENDS,
        _qwen_pictures("Qwen3VLProcessor", "Qwen2VLImageProcessorFast"),
    ),
}
