"""Tiny models of random weights that read images, sound or video, beyond those of ``vision_models``."""

from __future__ import annotations

import wave
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gym_fed.base.modeling import processors
from tests.support.audio_models import (
    QWEN3_ENCODER,
    RATE,
    audioflamingo3,
    films,
    moss,
    qwen2_audio,
    qwen3_asr,
    template,
    whisper_front_end,
)
from tests.support.vision_models import TEXT, VISION, _ends, _tokenizer


def _pixtral() -> tuple[Any, Any]:
    from transformers import (
        LlavaConfig,
        LlavaForConditionalGeneration,
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
        chat_template=template(image="[IMG]"),
    )
    config = LlavaConfig(
        text_config=MistralConfig(**TEXT, **_ends(tokenizer), head_dim=8, sliding_window=None),
        vision_config=PixtralVisionConfig(**{**VISION, "image_size": 64}),
        image_token_index=processor.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return LlavaForConditionalGeneration(config), processor


def _llama4() -> tuple[Any, Any]:
    from transformers import (
        Llama4Config,
        Llama4ForConditionalGeneration,
        Llama4ImageProcessor,
        Llama4Processor,
        Llama4TextConfig,
        Llama4VisionConfig,
    )

    names = ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>")
    tokenizer = _tokenizer(*names, "<|tile_x_separator|>", "<|tile_y_separator|>")
    processor = Llama4Processor(
        Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=2),
        tokenizer,
        patch_size=4,
        pixel_shuffle_ratio=0.5,
        chat_template=template(image="<|image|>"),
    )
    config = Llama4Config(
        text_config=Llama4TextConfig(
            **{**TEXT, "intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 2},
            **_ends(tokenizer),
        ),
        vision_config=Llama4VisionConfig(
            **{**VISION, "intermediate_size": 128, "patch_size": 4, "projector_input_dim": 32},
            **{"projector_output_dim": 32, "vision_output_dim": 32},
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
    )
    return Llama4ForConditionalGeneration(config), processor


def _minicpmv() -> tuple[Any, Any]:
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration
    from transformers.models.minicpmv4_6 import image_processing_pil_minicpmv4_6 as images
    from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

    names = {
        **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        **{"image_start_token": "<image>", "image_end_token": "</image>"},
        **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
        **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
    }
    tokenizer = _tokenizer(*names.values())
    tokenizer._set_model_specific_special_tokens(names)
    processor = MiniCPMV4_6Processor(
        images.MiniCPMV4_6ImageProcessorPil(max_slice_nums=2, scale_resolution=56),
        films("MiniCPMV4_6VideoProcessor", slice_mode=True, downsample_mode="16x"),
        tokenizer,
        chat_template=template(image="<|image_pad|>"),
    )
    config = MiniCPMV4_6Config(
        text_config={
            **TEXT,
            **_ends(tokenizer),
            **{
                "model_type": "qwen3_5_text",
                "head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
            },
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            **{"layer_types": ["linear_attention", "full_attention"]},
        },
        vision_config={**VISION, "image_size": 56, "patch_size": 14, "num_hidden_layers": 2},
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        insert_layer_id=0,
        image_size=56,
    )
    return MiniCPMV4_6ForConditionalGeneration(config), processor


def _qwen2_5_omni() -> tuple[Any, Any]:
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2_5OmniThinkerConfig,
        Qwen2_5OmniThinkerForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    names = {
        **{"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>"},
        **{"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
        **{"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    }
    tokenizer = _tokenizer(*names.values())
    tokenizer._set_model_specific_special_tokens(names)
    processor = Qwen2_5OmniProcessor(
        Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}),
        films("Qwen2VLVideoProcessor", patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}),
        whisper_front_end(),
        tokenizer,
        chat_template=template(
            image="<|vision_bos|><|IMAGE|><|vision_eos|>",
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
            video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        ),
    )
    id_of = tokenizer.convert_tokens_to_ids
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            **{"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "encoder_layers": 1},
            **{"num_mel_bins": 16, "max_source_positions": 100, "n_window": 50, "output_dim": 32},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8},
            **{"out_hidden_size": 32, "window_size": 32, "fullatt_block_indexes": [1]},
        },
        text_config={
            **TEXT,
            **_ends(tokenizer),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        audio_token_index=id_of("<|AUDIO|>"),
        image_token_index=id_of("<|IMAGE|>"),
        video_token_index=id_of("<|VIDEO|>"),
        audio_start_token_id=id_of("<|audio_bos|>"),
        audio_end_token_id=id_of("<|audio_eos|>"),
        vision_start_token_id=id_of("<|vision_bos|>"),
        vision_end_token_id=id_of("<|vision_eos|>"),
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config), processor


def _qwen3_omni() -> tuple[Any, Any]:
    from transformers import (
        Qwen2VLImageProcessorPil,
        Qwen3OmniMoeProcessor,
        Qwen3OmniMoeThinkerConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    names = {
        **{"image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>"},
        **{"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
        **{"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
    }
    tokenizer = _tokenizer(*names.values())
    tokenizer._set_model_specific_special_tokens(names)
    processor = Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}),
        films("Qwen2VLVideoProcessor", patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}),
        whisper_front_end(),
        tokenizer,
        chat_template=template(
            image="<|vision_start|><|image_pad|><|vision_end|>",
            audio="<|audio_start|><|audio_pad|><|audio_end|>",
            video="<|vision_start|><|video_pad|><|vision_end|>",
        ),
    )
    id_of = tokenizer.convert_tokens_to_ids
    config = Qwen3OmniMoeThinkerConfig(
        audio_config={**QWEN3_ENCODER, "max_source_positions": 100},
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8},
            **{"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        },
        text_config={
            **TEXT,
            **_ends(tokenizer),
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        audio_token_id=id_of("<|audio_pad|>"),
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        audio_start_token_id=id_of("<|audio_start|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
    )
    return Qwen3OmniMoeThinkerForConditionalGeneration(config), processor


MAKERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "pixtral": _pixtral,
    "llama4": _llama4,
    "minicpmv4_6": _minicpmv,
    "qwen2_audio": qwen2_audio,
    "audioflamingo3": audioflamingo3,
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen3_omni_thinker": _qwen3_omni,
    "qwen3_asr": qwen3_asr,
    "moss_transcribe_diarize": moss,
}


def media_model(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model of this class with its processor into a folder."""
    torch.manual_seed(seed)
    with processors.without_torchvision():
        model, processor = MAKERS[kind]()
    with torch.no_grad():  # so that greedy answers are not all of one token
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def sound(seconds: float = 0.5, frequency: float = 440.0, rate: int = RATE) -> bytes:
    """A sine as a WAV file."""
    times = np.arange(int(seconds * rate)) / rate
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((np.sin(2 * np.pi * frequency * times) * 20_000).astype("<i2").tobytes())
    return file.getvalue()


def video(
    frames: int = 20,
    width: int = 64,
    height: int = 48,
    fps: int = 10,
    *,
    format: str = "mp4",
    codec: str = "mpeg4",
    options: dict[str, str] | None = None,
) -> bytes:
    """A file whose frames get brighter."""
    import av

    file = BytesIO()
    with av.open(file, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.full((height, width, 3), 6 * number % 256, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
