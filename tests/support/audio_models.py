"""Tiny models of random weights that read sound, and what all models of media are made of."""

from __future__ import annotations

import importlib.util
from typing import Any

from tests.support.vision_models import TEXT, _ends, _no_films, _tokenizer

RATE = 16_000
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% elif part['type'] == 'audio' %}{{ 'AUDIO' }}{% elif part['type'] == 'video' %}{{ 'VIDEO' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As the classes' own: contents are lists of parts, and the assistant's words are not marked."""


def template(image: str = "", audio: str = "", video: str = "") -> str:
    return TEMPLATE.replace("IMAGE", image).replace("AUDIO", audio).replace("VIDEO", video)


def films(name: str, **settings: Any) -> Any:
    """The processor of videos, or its placeholder where torchvision is missing."""
    if importlib.util.find_spec("torchvision") is not None:
        import transformers

        return getattr(transformers, name)(**settings)
    placeholder = _no_films()
    kept = {**settings, "video_processor_type": name}
    vars(placeholder).update(kept, to_dict=kept.copy)
    return placeholder


def whisper_front_end(**changes: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(**{"feature_size": 16, "chunk_length": 2, **changes})


def qwen2_audio() -> tuple[Any, Any]:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
    )

    tokenizer = _tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    processor = Qwen2AudioProcessor(
        whisper_front_end(),
        tokenizer,
        chat_template=template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    config = Qwen2AudioConfig(
        audio_config={
            **{"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 64, "encoder_layers": 1, "num_mel_bins": 16, "max_source_positions": 100},
        },
        text_config=Qwen2Config(**TEXT, **_ends(tokenizer)).to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return Qwen2AudioForConditionalGeneration(config), processor


def audioflamingo3() -> tuple[Any, Any]:
    from transformers import (
        AudioFlamingo3Config,
        AudioFlamingo3ForConditionalGeneration,
        AudioFlamingo3Processor,
        Qwen2Config,
    )

    tokenizer = _tokenizer("<sound>")
    processor = AudioFlamingo3Processor(
        whisper_front_end(), tokenizer, chat_template=template(audio="<sound>"), audio_token="<sound>"
    )
    config = AudioFlamingo3Config(
        audio_config={
            **{"model_type": "audioflamingo3_encoder", "hidden_size": 32, "num_attention_heads": 2},
            **{
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_mel_bins": 16,
                "max_source_positions": 100,
            },
        },
        text_config=Qwen2Config(**TEXT, **_ends(tokenizer)).to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )
    return AudioFlamingo3ForConditionalGeneration(config), processor


QWEN3_ENCODER = {
    **{"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "encoder_layers": 1},
    **{"num_mel_bins": 16, "output_dim": 32, "downsample_hidden_size": 8},
}


_QWEN3_TOKENS = {
    **{"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>"},
    "audio_eos_token": "<|audio_end|>",
}


def qwen3_asr() -> tuple[Any, Any]:
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration, Qwen3ASRProcessor, Qwen3Config
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    tokenizer = _tokenizer(*_QWEN3_TOKENS.values())
    tokenizer._set_model_specific_special_tokens(_QWEN3_TOKENS)
    processor = Qwen3ASRProcessor(
        Qwen3ASRFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer,
        chat_template=template(audio="<|audio_start|><|audio_pad|><|audio_end|>"),
    )
    config = Qwen3ASRConfig(
        audio_config={"model_type": "qwen3_asr_encoder", **QWEN3_ENCODER},
        text_config=Qwen3Config(**TEXT, **_ends(tokenizer), head_dim=8).to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    return Qwen3ASRForConditionalGeneration(config), processor


def moss() -> tuple[Any, Any]:
    from transformers import (
        MossTranscribeDiarizeConfig,
        MossTranscribeDiarizeFeatureExtractor,
        MossTranscribeDiarizeForConditionalGeneration,
        MossTranscribeDiarizeProcessor,
        Qwen3Config,
    )

    tokenizer = _tokenizer(*_QWEN3_TOKENS.values())
    processor = MossTranscribeDiarizeProcessor(
        MossTranscribeDiarizeFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer,
        chat_template=template(audio="<|audio_start|><|audio_pad|><|audio_end|>"),
        audio_merge_size=4,
    )
    config = MossTranscribeDiarizeConfig(
        audio_config={
            **{"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1},
            **{"num_mel_bins": 16, "max_source_positions": 100},
        },
        text_config=Qwen3Config(**TEXT, **_ends(tokenizer), head_dim=8).to_dict(),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        audio_chunk_size=2 * RATE,
    )
    return MossTranscribeDiarizeForConditionalGeneration(config), processor
