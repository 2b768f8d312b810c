"""Translates the keys of LLaMA-Factory 0.9 to ours. Where a file omits a key, LLaMA-Factory's default is written."""

from __future__ import annotations

import difflib
import json
import math
import re
from pathlib import Path
from typing import Any

from gym_fed.config.llamafactory.keys import LOOKS_AWAY, NO_COUNTERPART, NOT_NEEDED, NOT_NEEDED_PREFIXES
from gym_fed.config.llamafactory.optimizers import translate_optimizer
from gym_fed.config.llamafactory.stages import translate_stage
from gym_fed.config.llamafactory.translation import Translation, Translator, names
from gym_fed.data.chat_templates.named import NAMED
from gym_fed.errors import GymError
from gym_fed.kinds import TRACKERS

_FULL = ("full", "freeze")
_OF_METHODS = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora", "use_rslora", "pissa_init"),
    *("pissa_iter", "loraplus_lr_ratio", "oft_rank", "oft_block_size", "oft_target", "module_dropout"),
    *("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "additional_target"),
)


def translate(given: dict[str, Any]) -> Translation:
    """Translate the values of one file; see ``Translation``. Reads the model's config.json for ``rope_scaling``."""
    translator = Translator(given)
    translator.move("model_name_or_path", "model")
    algorithm = translate_stage(translator)
    tuning = _tuning(translator)
    _precision(translator, quantized="quantization" in translator.result.values, adapter=tuning not in _FULL)
    _data(translator, algorithm)
    _vision(translator)
    _features(translator)
    translate_optimizer(translator)
    _schedule(translator)
    _run(translator)
    _distributed(translator)
    for key, why in NO_COUNTERPART.items():
        translator.lose_if(key, why, harmless=(False, *LOOKS_AWAY.get(key, ())))
    _leave(translator)
    return translator.result


def _leave(translator: Translator) -> None:
    """Name what is left: keys that need no counterpart, and keys that are unknown."""
    known = [*NOT_NEEDED, *NO_COUNTERPART, *translator.known, *_OF_METHODS]
    for key in translator.untaken():
        why = NOT_NEEDED.get(key)
        why = why or next(
            (text for start, text in NOT_NEEDED_PREFIXES.items() if key.startswith(start)), None
        )
        value = translator.take(key)
        if why is None:
            close = difflib.get_close_matches(key, known, n=1)
            translator.lose(key, "unknown key" + (f" (did you mean {close[0]!r}?)" if close else ""))
        elif value not in (None, False):
            translator.note(key, why)


def _tuning(translator: Translator) -> str:
    method = str(translator.take("finetuning_type", "lora"))
    translator.put("finetuning", method, "finetuning_type")
    if method == "lora":
        _lora(translator)
    elif method == "oft":
        rank = translator.take("oft_rank", 0)
        translator.put("oft.r", rank, "oft_rank")
        translator.put(
            "oft.oft_block_size", translator.take("oft_block_size", 0 if rank else 32), "oft_block_size"
        )
        translator.move("module_dropout", "oft.module_dropout")
        _targets(translator, "oft_target", "oft")
    elif method == "freeze":
        translator.move("freeze_trainable_layers", "freeze.num_trainable_layers", 2)
        if (modules := translator.take("freeze_trainable_modules", "all")) != "all":
            translator.put("freeze.trainable_modules", names(modules), "freeze_trainable_modules")
        if extra := translator.take("freeze_extra_modules"):
            translator.put("freeze.extra_modules", names(extra), "freeze_extra_modules")
    for key in _OF_METHODS:
        if key in translator.untaken():
            translator.take(key)
            translator.note(key, f"finetuning_type {method} does not read it")
    _quantization(translator)
    return method


def _lora(translator: Translator) -> None:
    rank = translator.take("lora_rank", 8)
    translator.put("lora.r", rank, "lora_rank")
    doubled = 2 * rank if isinstance(rank, int) else 16
    translator.put("lora.lora_alpha", translator.take("lora_alpha", doubled), "lora_alpha")
    translator.move("lora_dropout", "lora.lora_dropout")
    _targets(translator, "lora_target", "lora")
    for key in ("use_dora", "use_rslora", "loraplus_lr_ratio"):
        translator.move(key, f"lora.{key}")
    translator.lose_if(
        "loraplus_lr_embedding", "embeddings have B's rate", harmless=(1e-6, "1e-6", "1.0e-6", False)
    )
    steps = translator.take("pissa_iter", 16)
    if translator.take("pissa_init", False):
        translator.put(
            "lora.init_lora_weights", "pissa" if steps == -1 else f"pissa_niter_{steps}", "pissa_init"
        )
        if not translator.take("pissa_convert", False):
            translator.note(
                "pissa_init", "the saved adapter is converted to a plain LoRA of the model as it was"
            )
    translator.take("pissa_convert")


def _targets(translator: Translator, key: str, section: str) -> None:
    target = translator.take(key, "all")
    translator.put(f"{section}.target_modules", "all-linear" if target == "all" else names(target), key)
    if extra := translator.take("additional_target"):
        translator.put(f"{section}.modules_to_save", names(extra), "additional_target")


def _quantization(translator: Translator) -> None:
    method = str(translator.take("quantization_method", "bnb"))
    bits, kind = translator.take("quantization_bit"), translator.take("quantization_type", "nf4")
    double = translator.take("double_quantization", True)
    if bits is None:
        return
    if method not in ("bnb", "bitsandbytes"):
        translator.lose("quantization_method", f"{method} does not quantise a model while it is read here")
        return
    translator.put("quantization.bits", bits, "quantization_bit")
    if bits == 4:
        translator.put("quantization.quant_type", kind, "quantization_type")
        translator.put("quantization.double_quant", double, "double_quantization")


def _precision(translator: Translator, *, quantized: bool, adapter: bool) -> None:
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if not translator.take(key, False):
            continue
        if key == "bf16" and translator.has("pure_bf16"):
            continue
        translator.put("mixed_precision", key, key)
        if quantized and translator.result.values["quantization"].get("bits") == 4:
            translator.put("quantization.compute_dtype", dtype, key)
        elif adapter:
            translator.note(
                key, f"the frozen weights stay in float32 here; dtype: {dtype} halves their memory"
            )
    if translator.take("pure_bf16", False):
        translator.put("dtype", "bfloat16", "pure_bf16")
        translator.result.values.pop("mixed_precision", None)
    translator.put(
        "gradient_checkpointing",
        not translator.take("disable_gradient_checkpointing", False),
        "disable_gradient_checkpointing",
    )


def _data(translator: Translator, algorithm: str) -> None:
    folder = str(translator.take("dataset_dir", "data"))
    most = translator.take("max_samples")
    info = folder if folder.endswith(".json") else str(Path(folder) / "dataset_info.json")
    for key, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        if translator.has(key):
            limit = {} if most is None else {"num_examples": most}
            sources = [
                {"dataset": name, "dataset_info": info, **limit} for name in names(translator.take(key))
            ]
            translator.put(ours, sources, key)
    if folder.startswith("REMOTE:") or folder == "ONLINE":
        translator.lose("dataset_dir", "the file dataset_info.json is read from this machine")
    media = translator.take("media_dir")
    if media is not None and str(media) != folder:
        translator.lose("media_dir", "images are found beside the file that names them")
    held = translator.take("val_size", 0)
    if held:
        translator.put("eval_split", held, "val_size")
    translator.lose_if("mix_strategy", "sources are joined", harmless=("concat",))
    translator.move("cutoff_len", "max_length", 2048)
    packing, neat = translator.take("packing"), translator.take("neat_packing", False)
    if algorithm == "pretrain":
        if packing is not None:
            translator.put("packing", bool(packing), "packing")
    elif algorithm != "sft":
        for key, value in (("packing", packing), ("neat_packing", neat)):
            if value:
                translator.note(key, "only pre-training and sft read it")
    elif packing or neat:
        key = "neat_packing" if neat else "packing"
        translator.put("packing", "bfd", key)
        if not neat:
            translator.note(key, "packed rows do not see each other here (LLaMA-Factory's neat_packing)")
    for key in ("train_on_prompt", "mask_history"):
        if translator.take(key, False) and algorithm == "sft":
            translator.put(key, True, key)
    _template(translator)


def _template(translator: Translator) -> None:
    """The names that we know write as there; others are left to a tokenizer that has a template."""
    name = translator.take("template")
    if name is None or name == "empty":
        return
    if name in NAMED:
        translator.put("chat_template", name, "template")
    elif _has_template(str(translator.result.values.get("model"))):
        translator.note(
            "template", f"{name!r} is not read; conversations are written by the tokenizer's own template"
        )
    else:
        translator.lose(
            "template",
            f"{name!r} is unknown, and the tokenizer has no template; known are {', '.join(NAMED)}",
        )


def _has_template(model: str) -> bool:
    """Whether a model that is on this machine has a chat template; False for one that is not here."""
    from gym_fed.models import resolve

    try:
        folder = Path(resolve(model))
    except GymError:
        return True
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))


def _vision(translator: Translator) -> None:
    """Their sizes of images hold wherever the model reads any, also where the file does not set them."""
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"):
        translator.move(key, key)
    sizes = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32}
    reads_images = translator.result.values.get("algorithm") == "sft" and _reads_images(translator)
    for key, default in sizes.items():
        translator.move(key, key, default if reads_images else None)


def _reads_images(translator: Translator) -> bool:
    from gym_fed.models import resolve

    try:
        file = Path(resolve(str(translator.result.values.get("model")))) / "config.json"
    except GymError:  # a model that is not here is refused when it is loaded
        return False
    return file.is_file() and "vision_config" in json.loads(file.read_text(encoding="utf-8"))


def _features(translator: Translator) -> None:
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
    from gym_fed.models import resolve

    values = json.loads(
        (Path(resolve(translator.result.values["model"])) / "config.json").read_text(encoding="utf-8")
    )
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


def _schedule(translator: Translator) -> None:
    translator.move("learning_rate", "learning_rate", 5e-5)
    translator.move("lr_scheduler_type", "lr_scheduler_type", "linear")
    translator.move("lr_scheduler_kwargs", "lr_scheduler_kwargs")
    warmup = translator.take("warmup_steps", 0)
    if isinstance(warmup, float) and 0 < warmup < 1:
        translator.put("warmup_ratio", warmup, "warmup_steps")
        translator.take("warmup_ratio")
    elif warmup:
        translator.put("warmup_steps", int(warmup), "warmup_steps")
        translator.take("warmup_ratio")  # steps win there
    else:
        translator.move("warmup_ratio", "warmup_ratio")
    for key in ("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "gradient_accumulation_steps"):
        translator.move(key, key)
    translator.move("num_train_epochs", "num_train_epochs", 3.0)
    translator.move("per_device_train_batch_size", "per_device_train_batch_size", 8)
    steps = translator.take("max_steps", -1)
    if steps != -1:
        translator.put("max_steps", steps, "max_steps")


def _run(translator: Translator) -> None:
    translator.move("output_dir", "output_dir")
    translator.move("seed", "seed", 42)
    translator.lose_if(
        "data_seed", "one seed decides everything", harmless=(translator.result.values["seed"],)
    )
    translator.move("logging_steps", "logging_steps", 500)
    saves = translator.take("save_steps", 500)
    strategy = str(translator.take("save_strategy", "steps"))
    if strategy == "epoch":
        translator.note("save_strategy", "checkpoints are saved every so many steps, not epochs")
        saves = 0
    translator.put("save_steps", 0 if strategy == "no" else saves, "save_steps")
    translator.move("save_total_limit", "save_total_limit")
    evaluates, every = (
        str(translator.take("eval_strategy", translator.take("evaluation_strategy", "no"))),
        "eval_steps",
    )
    steps = translator.take(every)
    if evaluates == "steps" and (
        "eval_split" in translator.result.values or "eval_data" in translator.result.values
    ):
        translator.put("eval_steps", steps or translator.result.values["logging_steps"], every)
    if (patience := translator.take("early_stopping_steps")) is not None:
        translator.put("early_stopping.patience", patience, "early_stopping_steps")
    trackers = [name for name in names(translator.take("report_to", "none")) if name not in ("none", "[]")]
    known = [name for name in trackers if name in TRACKERS]
    if known:
        translator.put("tracking", known, "report_to")
    if others := [name for name in trackers if name not in known]:
        translator.note("report_to", f"{', '.join(others)}: no such tracker; see tracking")
    if (name := translator.take("run_name")) is not None:
        translator.put("tracker.name", str(name), "run_name")
    if translator.take("resume_from_checkpoint"):
        translator.note(
            "resume_from_checkpoint", "gym train goes on from the last checkpoint in output_dir by itself"
        )


def _distributed(translator: Translator) -> None:
    deepspeed, fsdp = translator.take("deepspeed"), translator.take("fsdp")
    translator.take("fsdp_config")
    if deepspeed:
        text = str(deepspeed)
        stage, offload = _zero(text)
        if stage is None:
            translator.lose("deepspeed", f"{text} is not here, and its name does not contain the ZeRO stage")
        elif stage in (2, 3):
            translator.put("distributed.strategy", "deepspeed", "deepspeed")
            translator.put("distributed.zero_stage", stage, "deepspeed")
            translator.put("distributed.cpu_offload", offload, "deepspeed")
            translator.note(
                "deepspeed", "stage and offloading are read; the rest of the file is transformers' choice"
            )
        else:
            translator.note(
                "deepspeed", f"ZeRO stage {stage} shards no gradients: plain data-parallel processes do"
            )
    elif fsdp:
        translator.put("distributed.strategy", "fsdp2", "fsdp")
        translator.put("distributed.cpu_offload", "offload" in str(fsdp), "fsdp")


def _zero(file: str) -> tuple[int | None, bool]:
    """Stage and offloading of a DeepSpeed file; by its name (``ds_z3_offload_config.json``) when it is not here."""
    path = Path(file)
    if path.is_file():
        zero = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {})
        return int(zero.get("stage", 0)), any(key.startswith("offload_") for key in zero)
    found = re.search(r"z(?:ero)?_?([0123])", path.name)
    return (int(found.group(1)) if found else None), "offload" in path.name
