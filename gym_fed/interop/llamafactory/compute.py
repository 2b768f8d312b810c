"""Translates what a run computes in, how large pictures are, and the features of the model's code."""

from __future__ import annotations

import math
from pathlib import Path

from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object
from gym_fed.interop.llamafactory.translation import Translator


def translate_precision(translator: Translator, *, adapter: bool) -> None:
    """Write the types that weights are held in and multiplied in; to be called when ``distributed`` is written."""
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if not translator.take(key, False):
            continue
        if key == "bf16" and translator.has("pure_bf16"):
            continue
        translator.put("mixed_precision", key, key)
        if translator.result.values.get("quantization", {}).get("bits") == 4:
            translator.put("quantization.compute_dtype", dtype, key)
        if not adapter:
            continue
        if "distributed" in translator.result.values:
            translator.note(key, "frozen weights that are split over processes stay in float32 here")
        else:
            translator.put("base_dtype", dtype, key)
    if translator.take("pure_bf16", False):
        translator.put("dtype", "bfloat16", "pure_bf16")
        for key in ("mixed_precision", "base_dtype"):
            translator.result.values.pop(key, None)
    again = translator.take("gradient_checkpointing")
    kept = translator.take("disable_gradient_checkpointing", False)
    translator.put(
        "gradient_checkpointing",
        not kept if again is None else bool(again) and not kept,
        "disable_gradient_checkpointing" if again is None else "gradient_checkpointing",
    )


def translate_vision(translator: Translator) -> None:
    """Their sizes of images hold wherever the model reads any, also where the file does not set them."""
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"):
        translator.move(key, key)
    sizes = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32}
    reads_images = translator.result.values.get("algorithm") == "sft" and _reads_images(translator)
    for key, default in sizes.items():
        translator.move(key, key, default if reads_images else None)


def _reads_images(translator: Translator) -> bool:
    from gym_fed.base.models import resolve

    try:
        file = Path(resolve(str(translator.result.values.get("model")))) / "config.json"
    except GymError:  # a model that is not here is refused when it is loaded
        return False
    return file.is_file() and "vision_config" in read_object(file)


def translate_features(translator: Translator) -> None:
    translator.move("neftune_noise_alpha", "neftune_noise_alpha")
    attention = str(translator.take("flash_attn", "auto"))
    known = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
    if attention not in known:
        translator.lose("flash_attn", f"{attention} is not offered; fa2 is flash_attention_2")
    elif known[attention] != "auto":
        translator.put("attention", known[attention], "flash_attn")
    if translator.take("shift_attn", False):
        translator.put("shift_attention", {"group_size_ratio": 0.25}, "shift_attn")
    depths = translator.take("mixture_of_depths")
    if depths == "convert":
        translator.put("mixture_of_depths", {"capacity": 0.125, "every": 2}, "mixture_of_depths")
    elif depths:
        translator.lose("mixture_of_depths", "models that LLaMA-Factory converted are of another kind")
    for key, ours in (("enable_liger_kernel", "liger"), ("use_unsloth", "unsloth")):
        if translator.take(key, False):
            translator.put(ours, True, key)
    if translator.take("torch_compile", False):
        translator.put("torch_compile", True, "torch_compile")
    translator.move("torch_compile_backend", "torch_compile_backend")
    _rope(translator)


def _rope(translator: Translator) -> None:
    """LLaMA-Factory stretches by what ``cutoff_len`` needs, which is known from the model's config alone."""
    kind = translator.take("rope_scaling")
    if kind is None:
        return
    from gym_fed.base.models import resolve

    values = read_object(Path(resolve(translator.result.values["model"])) / "config.json")
    known, wanted = int(values.get("max_position_embeddings", 0)), int(translator.result.values["max_length"])
    if wanted <= known:
        translator.note(
            "rope_scaling", f"not needed: cutoff_len is {wanted}, and the model reads {known} tokens"
        )
        return
    if not known:
        translator.lose("rope_scaling", "the model's config does not set how long its rows may be")
        return
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    translator.put(
        "rope_scaling", {"type": kind, "factor": float(math.ceil(wanted / known)), **extra}, "rope_scaling"
    )
