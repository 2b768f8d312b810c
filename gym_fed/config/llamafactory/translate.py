"""From the keys of LLaMA-Factory 0.9 to ours. Where a file leaves a key out, its default there is written out here."""

from __future__ import annotations

import difflib
import json
import math
import re
from pathlib import Path
from typing import Any

from gym_fed.config.llamafactory.keys import LOOKS_AWAY, NO_COUNTERPART, NOT_NEEDED, NOT_NEEDED_PREFIXES
from gym_fed.config.llamafactory.ledger import Ledger, Translation, names
from gym_fed.config.llamafactory.optimizers import translate_optimizer
from gym_fed.config.llamafactory.stages import translate_stage
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
    ledger = Ledger(given)
    ledger.move("model_name_or_path", "model")
    algorithm = translate_stage(ledger)
    tuning = _tuning(ledger)
    _precision(ledger, quantized="quantization" in ledger.result.values, adapter=tuning not in _FULL)
    _data(ledger, algorithm)
    _vision(ledger)
    _features(ledger)
    translate_optimizer(ledger)
    _schedule(ledger)
    _run(ledger)
    _distributed(ledger)
    for key, why in NO_COUNTERPART.items():
        ledger.lose_if(key, why, harmless=(False, *LOOKS_AWAY.get(key, ())))
    _leave(ledger)
    return ledger.result


def _leave(ledger: Ledger) -> None:
    """Name what is left: keys that need no counterpart, and keys that are unknown."""
    known = [*NOT_NEEDED, *NO_COUNTERPART, *ledger.asked, *_OF_METHODS]
    for key in ledger.rest():
        why = NOT_NEEDED.get(key)
        why = why or next(
            (text for start, text in NOT_NEEDED_PREFIXES.items() if key.startswith(start)), None
        )
        value = ledger.take(key)
        if why is None:
            close = difflib.get_close_matches(key, known, n=1)
            ledger.lose(key, "unknown key" + (f" (did you mean {close[0]!r}?)" if close else ""))
        elif value not in (None, False):
            ledger.note(key, why)


def _tuning(ledger: Ledger) -> str:
    method = str(ledger.take("finetuning_type", "lora"))
    ledger.put("finetuning", method, "finetuning_type")
    if method == "lora":
        _lora(ledger)
    elif method == "oft":
        rank = ledger.take("oft_rank", 0)
        ledger.put("oft.r", rank, "oft_rank")
        ledger.put("oft.oft_block_size", ledger.take("oft_block_size", 0 if rank else 32), "oft_block_size")
        ledger.move("module_dropout", "oft.module_dropout")
        _targets(ledger, "oft_target", "oft")
    elif method == "freeze":
        ledger.move("freeze_trainable_layers", "freeze.num_trainable_layers", 2)
        if (modules := ledger.take("freeze_trainable_modules", "all")) != "all":
            ledger.put("freeze.trainable_modules", names(modules), "freeze_trainable_modules")
        if extra := ledger.take("freeze_extra_modules"):
            ledger.put("freeze.extra_modules", names(extra), "freeze_extra_modules")
    for key in _OF_METHODS:
        if key in ledger.rest():
            ledger.take(key)
            ledger.note(key, f"finetuning_type {method} does not read it")
    _quantization(ledger)
    return method


def _lora(ledger: Ledger) -> None:
    rank = ledger.take("lora_rank", 8)
    ledger.put("lora.r", rank, "lora_rank")
    doubled = 2 * rank if isinstance(rank, int) else 16
    ledger.put("lora.lora_alpha", ledger.take("lora_alpha", doubled), "lora_alpha")
    ledger.move("lora_dropout", "lora.lora_dropout")
    _targets(ledger, "lora_target", "lora")
    for key in ("use_dora", "use_rslora", "loraplus_lr_ratio"):
        ledger.move(key, f"lora.{key}")
    ledger.lose_if(
        "loraplus_lr_embedding", "embeddings have B's rate", harmless=(1e-6, "1e-6", "1.0e-6", False)
    )
    steps = ledger.take("pissa_iter", 16)
    if ledger.take("pissa_init", False):
        ledger.put("lora.init_lora_weights", "pissa" if steps == -1 else f"pissa_niter_{steps}", "pissa_init")
        if not ledger.take("pissa_convert", False):
            ledger.note("pissa_init", "the saved adapter is converted to a plain LoRA of the model as it was")
    ledger.take("pissa_convert")


def _targets(ledger: Ledger, key: str, section: str) -> None:
    target = ledger.take(key, "all")
    ledger.put(f"{section}.target_modules", "all-linear" if target == "all" else names(target), key)
    if extra := ledger.take("additional_target"):
        ledger.put(f"{section}.modules_to_save", names(extra), "additional_target")


def _quantization(ledger: Ledger) -> None:
    method = str(ledger.take("quantization_method", "bnb"))
    bits, kind = ledger.take("quantization_bit"), ledger.take("quantization_type", "nf4")
    double = ledger.take("double_quantization", True)
    if bits is None:
        return
    if method not in ("bnb", "bitsandbytes"):
        ledger.lose("quantization_method", f"{method} does not quantise a model while it is read here")
        return
    ledger.put("quantization.bits", bits, "quantization_bit")
    if bits == 4:
        ledger.put("quantization.quant_type", kind, "quantization_type")
        ledger.put("quantization.double_quant", double, "double_quantization")


def _precision(ledger: Ledger, *, quantized: bool, adapter: bool) -> None:
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if not ledger.take(key, False):
            continue
        if key == "bf16" and ledger.has("pure_bf16"):
            continue
        ledger.put("mixed_precision", key, key)
        if quantized and ledger.result.values["quantization"].get("bits") == 4:
            ledger.put("quantization.compute_dtype", dtype, key)
        elif adapter:
            ledger.note(key, f"the frozen weights stay in float32 here; dtype: {dtype} halves their memory")
    if ledger.take("pure_bf16", False):
        ledger.put("dtype", "bfloat16", "pure_bf16")
        ledger.result.values.pop("mixed_precision", None)
    ledger.put(
        "gradient_checkpointing",
        not ledger.take("disable_gradient_checkpointing", False),
        "disable_gradient_checkpointing",
    )


def _data(ledger: Ledger, algorithm: str) -> None:
    folder = str(ledger.take("dataset_dir", "data"))
    most = ledger.take("max_samples")
    info = folder if folder.endswith(".json") else str(Path(folder) / "dataset_info.json")
    for key, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        if ledger.has(key):
            limit = {} if most is None else {"num_examples": most}
            sources = [{"dataset": name, "dataset_info": info, **limit} for name in names(ledger.take(key))]
            ledger.put(ours, sources, key)
    if folder.startswith("REMOTE:") or folder == "ONLINE":
        ledger.lose("dataset_dir", "the file dataset_info.json is read from this machine")
    media = ledger.take("media_dir")
    if media is not None and str(media) != folder:
        ledger.lose("media_dir", "images are found beside the file that names them")
    held = ledger.take("val_size", 0)
    if held:
        ledger.put("eval_split", held, "val_size")
    ledger.lose_if("mix_strategy", "sources are joined", harmless=("concat",))
    ledger.move("cutoff_len", "max_length", 2048)
    packing, neat = ledger.take("packing"), ledger.take("neat_packing", False)
    if algorithm == "pretrain":
        if packing is not None:
            ledger.put("packing", bool(packing), "packing")
    elif algorithm != "sft":
        for key, value in (("packing", packing), ("neat_packing", neat)):
            if value:
                ledger.note(key, "only pre-training and sft read it")
    elif packing or neat:
        key = "neat_packing" if neat else "packing"
        ledger.put("packing", "bfd", key)
        if not neat:
            ledger.note(key, "packed rows do not see each other here (LLaMA-Factory's neat_packing)")
    for key in ("train_on_prompt", "mask_history"):
        if ledger.take(key, False) and algorithm == "sft":
            ledger.put(key, True, key)
    _template(ledger)


def _template(ledger: Ledger) -> None:
    """The names that we know write as there; others are left to a tokenizer that has a template."""
    name = ledger.take("template")
    if name is None or name == "empty":
        return
    if name in NAMED:
        ledger.put("chat_template", name, "template")
    elif _has_template(str(ledger.result.values.get("model"))):
        ledger.note(
            "template", f"{name!r} is not read; conversations are written by the tokenizer's own template"
        )
    else:
        ledger.lose(
            "template",
            f"{name!r} is unknown, and the tokenizer has no template; known are {', '.join(NAMED)}",
        )


def _has_template(model: str) -> bool:
    """Whether a model that is on this machine brings a chat template; one that is not is not asked."""
    from gym_fed.models import resolve

    try:
        folder = Path(resolve(model))
    except GymError:
        return True
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))


def _vision(ledger: Ledger) -> None:
    """Their sizes of images hold wherever the model reads any, also where the file says nothing of them."""
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"):
        ledger.move(key, key)
    sizes = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32}
    reads_images = ledger.result.values.get("algorithm") == "sft" and _reads_images(ledger)
    for key, default in sizes.items():
        ledger.move(key, key, default if reads_images else None)


def _reads_images(ledger: Ledger) -> bool:
    from gym_fed.models import resolve

    try:
        file = Path(resolve(str(ledger.result.values.get("model")))) / "config.json"
    except GymError:  # a model that is not here is refused by whoever loads it
        return False
    return file.is_file() and "vision_config" in json.loads(file.read_text(encoding="utf-8"))


def _features(ledger: Ledger) -> None:
    ledger.move("neftune_noise_alpha", "neftune_noise_alpha")
    attention = str(ledger.take("flash_attn", "auto"))
    known = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
    if attention not in known:
        ledger.lose("flash_attn", f"{attention} is not offered; fa2 is flash_attention_2")
    elif known[attention] != "auto":
        ledger.put("attention", known[attention], "flash_attn")
    if ledger.take("shift_attn", False):
        ledger.put("shift_attention", {"group_size_ratio": 0.25}, "shift_attn")
    depths = ledger.take("mixture_of_depths")
    if depths == "convert":
        ledger.put("mixture_of_depths", {"capacity": 0.125, "every": 2}, "mixture_of_depths")
    elif depths:
        ledger.lose("mixture_of_depths", "models that LLaMA-Factory converted are of another kind")
    for key, ours in (("enable_liger_kernel", "liger"), ("use_unsloth", "unsloth")):
        if ledger.take(key, False):
            ledger.put(ours, True, key)
    if ledger.take("torch_compile", False):
        ledger.put("torch_compile", True, "torch_compile")
    ledger.move("torch_compile_backend", "torch_compile_backend")
    _rope(ledger)


def _rope(ledger: Ledger) -> None:
    """LLaMA-Factory stretches by what ``cutoff_len`` needs, which only the model's config tells."""
    kind = ledger.take("rope_scaling")
    if kind is None:
        return
    from gym_fed.models import resolve

    values = json.loads(
        (Path(resolve(ledger.result.values["model"])) / "config.json").read_text(encoding="utf-8")
    )
    known, wanted = int(values.get("max_position_embeddings", 0)), int(ledger.result.values["max_length"])
    if wanted <= known:
        ledger.note("rope_scaling", f"not needed: cutoff_len is {wanted}, and the model reads {known} tokens")
        return
    if not known:
        ledger.lose("rope_scaling", "the model's config does not say how long its rows may be")
        return
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    ledger.put(
        "rope_scaling", {"type": kind, "factor": float(math.ceil(wanted / known)), **extra}, "rope_scaling"
    )


def _schedule(ledger: Ledger) -> None:
    ledger.move("learning_rate", "learning_rate", 5e-5)
    ledger.move("lr_scheduler_type", "lr_scheduler_type", "linear")
    ledger.move("lr_scheduler_kwargs", "lr_scheduler_kwargs")
    warmup = ledger.take("warmup_steps", 0)
    if isinstance(warmup, float) and 0 < warmup < 1:
        ledger.put("warmup_ratio", warmup, "warmup_steps")
        ledger.take("warmup_ratio")
    elif warmup:
        ledger.put("warmup_steps", int(warmup), "warmup_steps")
        ledger.take("warmup_ratio")  # steps win there
    else:
        ledger.move("warmup_ratio", "warmup_ratio")
    for key in ("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "gradient_accumulation_steps"):
        ledger.move(key, key)
    ledger.move("num_train_epochs", "num_train_epochs", 3.0)
    ledger.move("per_device_train_batch_size", "per_device_train_batch_size", 8)
    steps = ledger.take("max_steps", -1)
    if steps != -1:
        ledger.put("max_steps", steps, "max_steps")


def _run(ledger: Ledger) -> None:
    ledger.move("output_dir", "output_dir")
    ledger.move("seed", "seed", 42)
    ledger.lose_if("data_seed", "one seed decides everything", harmless=(ledger.result.values["seed"],))
    ledger.move("logging_steps", "logging_steps", 500)
    saves = ledger.take("save_steps", 500)
    strategy = str(ledger.take("save_strategy", "steps"))
    if strategy == "epoch":
        ledger.note("save_strategy", "checkpoints are saved every so many steps, not epochs")
        saves = 0
    ledger.put("save_steps", 0 if strategy == "no" else saves, "save_steps")
    ledger.move("save_total_limit", "save_total_limit")
    evaluates, every = (
        str(ledger.take("eval_strategy", ledger.take("evaluation_strategy", "no"))),
        "eval_steps",
    )
    steps = ledger.take(every)
    if evaluates == "steps" and ("eval_split" in ledger.result.values or "eval_data" in ledger.result.values):
        ledger.put("eval_steps", steps or ledger.result.values["logging_steps"], every)
    if (patience := ledger.take("early_stopping_steps")) is not None:
        ledger.put("early_stopping.patience", patience, "early_stopping_steps")
    told = [name for name in names(ledger.take("report_to", "none")) if name not in ("none", "[]")]
    known = [name for name in told if name in TRACKERS]
    if known:
        ledger.put("tracking", known, "report_to")
    if others := [name for name in told if name not in known]:
        ledger.note("report_to", f"{', '.join(others)}: not told; see tracking")
    if (name := ledger.take("run_name")) is not None:
        ledger.put("tracker.name", str(name), "run_name")
    if ledger.take("resume_from_checkpoint"):
        ledger.note(
            "resume_from_checkpoint", "gym train goes on from the last checkpoint in output_dir by itself"
        )


def _distributed(ledger: Ledger) -> None:
    deepspeed, fsdp = ledger.take("deepspeed"), ledger.take("fsdp")
    ledger.take("fsdp_config")
    if deepspeed:
        text = str(deepspeed)
        stage, offload = _zero(text)
        if stage is None:
            ledger.lose("deepspeed", f"{text} is not here, and its name does not tell the ZeRO stage")
        elif stage in (2, 3):
            ledger.put("distributed.strategy", "deepspeed", "deepspeed")
            ledger.put("distributed.zero_stage", stage, "deepspeed")
            ledger.put("distributed.cpu_offload", offload, "deepspeed")
            ledger.note(
                "deepspeed", "stage and offloading are read; the rest of the file is transformers' choice"
            )
        else:
            ledger.note(
                "deepspeed", f"ZeRO stage {stage} shards no gradients: plain data-parallel processes do"
            )
    elif fsdp:
        ledger.put("distributed.strategy", "fsdp2", "fsdp")
        ledger.put("distributed.cpu_offload", "offload" in str(fsdp), "fsdp")


def _zero(file: str) -> tuple[int | None, bool]:
    """Stage and offloading of a DeepSpeed file; by its name (``ds_z3_offload_config.json``) when it is not here."""
    path = Path(file)
    if path.is_file():
        zero = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {})
        return int(zero.get("stage", 0)), any(key.startswith("offload_") for key in zero)
    found = re.search(r"z(?:ero)?_?([0123])", path.name)
    return (int(found.group(1)) if found else None), "offload" in path.name
