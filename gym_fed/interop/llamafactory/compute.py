"""Translate optimiser, sharding, precision, image sizes and features of the model's code."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted
from gym_fed.interop.llamafactory.translation import Translator

_NAMES = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion", "paged_adamw_32bit": "paged_adamw", "paged_lion_32bit": "paged_lion",
    "schedule_free_adamw": "schedulefree_adamw", "schedule_free_sgd": "schedulefree_sgd",
    "schedule_free_radam": "schedulefree_radam",
}  # fmt: skip
_SWITCHES = {
    "use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_badam": "badam", "use_adam_mini": "adam_mini",
    "use_muon": "muon",
}  # fmt: skip
_APOLLO = {
    "update_interval": 200,
    "scale": 32.0,
    "proj": "random",
    "proj_type": "std",
    "scale_type": "channel",
}
_PROJECTED: dict[str, dict[str, Any]] = {
    "galore": {"rank": 16, "update_interval": 200, "scale": 2.0, "proj_type": "std"},
    "apollo": {"rank": 16, **_APOLLO},
}
_BADAM = {
    "switch_mode": ("badam_switch_mode", "ascending"),
    "switch_block_every": ("badam_switch_interval", 50),
    "start_block": ("badam_start_block", None),
}
_READ_BY = {"galore_": "use_galore", "apollo_": "use_apollo", "badam_": "use_badam"}


def translate_optimizer(translator: Translator) -> None:
    """Write ``optimizer`` and ``optimizer_args``."""
    base = str(translator.take("optim", "adamw_torch"))
    translator.put("optimizer", _NAMES.get(base, base), "optim")
    translator.lose_if("optim_args", "write them as optimizer_args")
    translator.lose_if("optim_target_modules", "projected optimisers apply to all linear layers")
    epsilon = translator.take("adam_epsilon", 1e-8)
    if float(epsilon) != 1e-8:
        translator.put("optimizer_args.eps", float(epsilon), "adam_epsilon")
    for switch, ours in _SWITCHES.items():
        if not translator.take(switch, False):
            continue
        translator.put("optimizer", ours, switch)
        if switch == "use_badam":
            _badam(translator)
        elif (family := switch.removeprefix("use_")) in _PROJECTED:
            _projected(translator, family, base)
    for key in translator.untaken():
        for start, switch in _READ_BY.items():
            if key.startswith(start) and key != "badam_verbose":
                translator.take(key)
                translator.note(key, f"used only with {switch}")


def _projected(translator: Translator, family: str, base: str) -> None:
    """Translate the settings of GaLore and APOLLO."""
    if family == "galore" and "8bit" in base:
        translator.put("optimizer", "galore_adamw_8bit", "optim")
    elif family == "galore" and base == "adafactor":
        translator.put("optimizer", "galore_adafactor", "optim")
    for name, default in _PROJECTED[family].items():
        ours = "update_proj_gap" if name == "update_interval" else name
        key = f"{family}_{name}"
        value: Any = translator.take(key, default)
        translator.put(f"optimizer_args.{ours}", value, key)
    translator.lose_if(f"{family}_target", "all linear layers are projected", harmless=("all", ["all"]))
    if translator.take(f"{family}_layerwise", False):
        translator.note(f"{family}_layerwise", "all layers are updated together: same result, more memory")
    if family == "apollo":
        translator.lose_if("apollo_scale_front", "the norm-growth limiter is applied after scaling")


def _badam(translator: Translator) -> None:
    mode = str(translator.take("badam_mode", "layer"))
    if mode != "layer":
        translator.lose("badam_mode", f"{mode} is not supported; only layer is")
    for ours, (key, default) in _BADAM.items():
        value = translator.take(key, default)
        if value is not None:
            translator.put(f"optimizer_args.{ours}", value, key)
    for key in ("badam_update_ratio", "badam_mask_mode", "badam_verbose"):
        translator.take(key)


_NO_ZERO = "use a DeepSpeed file with zero_optimization: {stage: 2} or {stage: 3}"


def translate_distributed(translator: Translator, processes: int | None) -> None:
    """Write ``distributed``; in one process (``processes`` is 1) a note states that nothing is sharded."""
    deepspeed, fsdp = translator.take("deepspeed"), translator.take("fsdp")
    translator.take("fsdp_config")
    if deepspeed:
        offloading(translator, "deepspeed", str(deepspeed), processes)
    elif fsdp:
        shard(translator, "fsdp", {"strategy": "fsdp2", "cpu_offload": "offload" in str(fsdp)}, processes)


def offloading(translator: Translator, key: str, file: str, processes: int | None) -> None:
    """Translate the DeepSpeed file that ``key`` names; also in one process."""
    stage, offload = _zero(file)
    if stage is None:
        translator.lose(key, f"{file} does not exist, and its name does not contain the ZeRO stage")
    elif stage in (2, 3):
        settings = {"strategy": "deepspeed", "zero_stage": stage, "cpu_offload": offload}
        shard(translator, key, settings, processes)
        if "distributed" in translator.result.values:
            translator.note(key, "only the stage and offloading settings of the file are used")
    else:
        translator.note(
            key, f"ZeRO stage {stage} shards no gradients; plain data parallelism is used instead"
        )


def shard(translator: Translator, key: str, settings: dict[str, Any], processes: int | None) -> None:
    """Write ``distributed``, unless the run has only one process."""
    if processes == 1:
        what = settings["strategy"]
        translator.note(key, f"a single process has nothing to distribute with {what}; use --nproc N")
        return
    for name, value in settings.items():
        translator.put(f"distributed.{name}", value, key)


def _zero(file: str) -> tuple[int | None, bool]:
    """Read ZeRO stage and offloading from a DeepSpeed file or, if it is missing, its name (``ds_z3_offload.json``)."""
    path = Path(file)
    if path.is_file():
        zero = read_object(path, ErrorCode.CONFIG_INVALID, _NO_ZERO).get("zero_optimization") or {}
        stage = zero.get("stage", 0) if isinstance(zero, dict) else None
        if stage not in (0, 1, 2, 3):
            raise GymError(ErrorCode.CONFIG_INVALID, f"{path}: no ZeRO stage from 0 to 3", _NO_ZERO)
        return int(stage), any(key.startswith("offload_") for key in zero)
    match = re.search(r"z(?:ero)?_?([0123])", path.name)
    return (int(match.group(1)) if match else None), "offload" in path.name


def translate_precision(translator: Translator, *, adapter: bool) -> None:
    """Write the dtypes of stored weights and of matrix products; must be called after ``distributed`` is written."""
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
            translator.note(key, "sharded frozen weights stay in float32")
        else:
            translator.put("base_dtype", dtype, key)
    if translator.take("pure_bf16", False):
        translator.put("dtype", "bfloat16", "pure_bf16")
        for key in ("mixed_precision", "base_dtype"):
            translator.result.values.pop(key, None)
    wanted = translator.take("gradient_checkpointing")
    disabled = translator.take("disable_gradient_checkpointing", False)
    is_on = (wanted is None or bool(wanted)) and not disabled
    origin = "disable_gradient_checkpointing" if wanted is None else "gradient_checkpointing"
    translator.put("gradient_checkpointing", is_on, origin)


def translate_vision(translator: Translator) -> None:
    """Write LLaMA-Factory's image sizes if the model reads images, even if the file does not set them."""
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"):
        translator.move(key, key)
    sizes = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32}
    reads_images = translator.result.values.get("algorithm") in ("sft", "dpo") and _reads_images(translator)
    for key, default in sizes.items():
        translator.move(key, key, default if reads_images else None)


def _reads_images(translator: Translator) -> bool:
    from gym_fed.base.models import resolve

    try:
        file = Path(resolve(str(translator.result.values.get("model")))) / "config.json"
    except GymError:  # a model that is not on this machine is refused when it is loaded
        return False
    return file.is_file() and "vision_config" in read_object(file)


def translate_features(translator: Translator) -> None:
    """Write NEFTune, attention, mixture of depths, kernels, compilation and RoPE scaling."""
    translator.move("neftune_noise_alpha", "neftune_noise_alpha")
    attention = str(translator.take("flash_attn", "auto"))
    known = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
    if attention not in known:
        translator.lose("flash_attn", f"{attention} is not supported; for flash_attention_2, write fa2")
    elif known[attention] != "auto":
        translator.put("attention", known[attention], "flash_attn")
    if translator.take("shift_attn", False):
        translator.put("shift_attention", {"group_size_ratio": 0.25}, "shift_attn")
    depths = translator.take("mixture_of_depths")
    if depths == "convert":
        translator.put("mixture_of_depths", {"capacity": 0.125, "every": 2}, "mixture_of_depths")
    elif depths:
        translator.lose(
            "mixture_of_depths", "models converted by LLaMA-Factory have a different architecture"
        )
    for key, ours in (("enable_liger_kernel", "liger"), ("use_unsloth", "unsloth")):
        if translator.take(key, False):
            translator.put(ours, True, key)
    if translator.take("torch_compile", False):
        translator.put("torch_compile", True, "torch_compile")
    translator.move("torch_compile_backend", "torch_compile_backend")
    _rope(translator)


def _rope(translator: Translator) -> None:
    """Write RoPE scaling with the factor that ``cutoff_len`` needs, which depends on the model's config."""
    kind = translator.take("rope_scaling")
    if kind is None:
        return
    from gym_fed.base.models import resolve

    values = read_object(Path(resolve(translator.result.values["model"])) / "config.json")
    known, wanted = int(values.get("max_position_embeddings", 0)), int(translator.result.values["max_length"])
    if wanted <= known:
        translator.note(
            "rope_scaling",
            f"not needed: cutoff_len is {wanted}, and the model's context is {counted(known, 'token')}",
        )
        return
    if not known:
        translator.lose("rope_scaling", "the model's config has no max_position_embeddings")
        return
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    translator.put(
        "rope_scaling", {"type": kind, "factor": float(math.ceil(wanted / known)), **extra}, "rope_scaling"
    )
