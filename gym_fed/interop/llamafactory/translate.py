"""Translate the keys of LLaMA-Factory 0.9. For a key that the file omits, LLaMA-Factory's default is written."""

from __future__ import annotations

from typing import Any

from gym_fed.config.parsed import Translation
from gym_fed.core.registries import TRACKERS
from gym_fed.interop.llamafactory.compute import (
    translate_distributed,
    translate_features,
    translate_optimizer,
    translate_precision,
    translate_vision,
)
from gym_fed.interop.llamafactory.rows import translate_rows
from gym_fed.interop.llamafactory.stages import translate_references, translate_stage
from gym_fed.interop.llamafactory.translation import (
    HARMLESS_VALUES,
    NO_COUNTERPART,
    NOT_NEEDED,
    NOT_NEEDED_PREFIXES,
    Translator,
    is_version_1,
    job_of,
    names,
)
from gym_fed.interop.llamafactory.version_1 import translate_version_1

_FULL = ("full", "freeze")
_METHOD_KEYS = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora", "use_rslora", "pissa_init"),
    *("pissa_iter", "loraplus_lr_ratio", "oft_rank", "oft_block_size", "oft_target", "module_dropout"),
    *("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "additional_target"),
    "use_llama_pro",
)


def translate(given: dict[str, Any], processes: int | None = None) -> Translation:
    """Translate the values of one file; see ``Translation``. Reads the model's config.json for ``rope_scaling``.

    Args:
        given: The values of a LLaMA-Factory file of version 0 or 1.
        processes: Number of processes of the run; None if unknown. With one, nothing is sharded.
    """
    if is_version_1(given):
        return translate_version_1(given, processes)
    translator = Translator(given)
    translator.move("model_name_or_path", "model")
    algorithm = translate_stage(translator, job_of(given))
    translate_references(translator)
    tuning = _tuning(translator)
    translate_rows(translator, algorithm)
    translate_vision(translator)
    translate_features(translator)
    translate_optimizer(translator)
    _schedule(translator)
    _run(translator)
    translate_distributed(translator, processes)
    translate_precision(translator, adapter=tuning not in _FULL)
    for key, why in NO_COUNTERPART.items():
        translator.lose_if(key, why, harmless=(False, *HARMLESS_VALUES.get(key, ())))
    translator.leave(NOT_NEEDED, NOT_NEEDED_PREFIXES, [*NO_COUNTERPART, *_METHOD_KEYS])
    return translator.result


_SHAPE = (
    *("lora_rank", "lora_alpha", "lora_target", "additional_target", "use_dora", "use_rslora"),
    *("pissa_init", "pissa_iter", "pissa_convert"),
)
"""Keys that define a new LoRA; an existing adapter has its own values."""


def _tuning(translator: Translator) -> str:
    method = str(translator.take("finetuning_type", "lora"))
    translator.put("finetuning", method, "finetuning_type")
    if method == "lora":
        values = translator.result.values
        if "adapter" in values and "new_adapter" not in values:
            for key in _SHAPE:
                if translator.has(key):
                    translator.take(key)
                    translator.note(key, "the value of the existing adapter is used")
            for key in ("lora_dropout", "loraplus_lr_ratio"):
                translator.move(key, "lora." + key)
        else:
            _lora(translator)
    elif method == "oft":
        rank = translator.take("oft_rank", 0)
        translator.put("oft.r", rank, "oft_rank")
        block_size = translator.take("oft_block_size", 0 if rank else 32)
        translator.put("oft.oft_block_size", block_size, "oft_block_size")
        translator.move("module_dropout", "oft.module_dropout")
        _targets(translator, "oft_target", "oft")
    elif method == "freeze":
        translator.move("freeze_trainable_layers", "freeze.num_trainable_layers", 2)
        if translator.take("use_llama_pro", False):
            translator.put("freeze.llama_pro", True, "use_llama_pro")
        if (modules := translator.take("freeze_trainable_modules", "all")) != "all":
            translator.put("freeze.trainable_modules", names(modules), "freeze_trainable_modules")
        if extra := translator.take("freeze_extra_modules"):
            translator.put("freeze.extra_modules", names(extra), "freeze_extra_modules")
    for key in _METHOD_KEYS:
        if key in translator.untaken():
            translator.take(key)
            translator.note(key, f"not used by finetuning_type {method}")
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
        "loraplus_lr_embedding",
        "embeddings use the learning rate of B",
        harmless=(1e-6, "1e-6", "1.0e-6", False),
    )
    steps = translator.take("pissa_iter", 16)
    if translator.take("pissa_init", False):
        start = "pissa" if steps == -1 else f"pissa_niter_{steps}"
        translator.put("lora.init_lora_weights", start, "pissa_init")
        if not translator.take("pissa_convert", False):
            translator.note(
                "pissa_init", "the saved adapter is converted to a plain LoRA of the original model"
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
        translator.lose("quantization_method", f"{method} cannot quantise a model while loading it")
        return
    translator.put("quantization.bits", bits, "quantization_bit")
    if bits == 4:
        translator.put("quantization.quant_type", kind, "quantization_type")
        translator.put("quantization.double_quant", double, "double_quantization")


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
        translator.take("warmup_ratio")  # steps take precedence in LLaMA-Factory
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
    same_seed = (translator.result.values["seed"],)
    translator.lose_if("data_seed", "seed also determines the order of the data", harmless=same_seed)
    translator.move("logging_steps", "logging_steps", 500)
    _cadence(translator)
    if (patience := translator.take("early_stopping_steps")) is not None:
        translator.put("early_stopping.patience", patience, "early_stopping_steps")
    trackers = [name for name in names(translator.take("report_to", "none")) if name not in ("none", "[]")]
    known = [name for name in trackers if name in TRACKERS]
    if known:
        translator.put("tracking", known, "report_to")
    if others := [name for name in trackers if name not in known]:
        translator.note("report_to", f"{', '.join(others)}: unknown tracker; see tracking")
    if (name := translator.take("run_name")) is not None:
        translator.put("tracker.name", str(name), "run_name")
    translator.move("resume_from_checkpoint", "resume_from_checkpoint")


def _cadence(translator: Translator) -> None:
    """Translate the intervals of checkpoints and evaluations."""
    saves, strategy = translator.take("save_steps", 500), str(translator.take("save_strategy", "steps"))
    if strategy in ("no", "epoch"):
        translator.put("save_strategy", strategy, "save_strategy")
    elif strategy == "steps":
        translator.put("save_steps", saves, "save_steps")
    else:
        translator.lose("save_strategy", f"{strategy!r} is not one of no, steps, epoch")
    translator.move("save_total_limit", "save_total_limit")
    key = "eval_strategy" if translator.has("eval_strategy") else "evaluation_strategy"
    strategy = str(translator.take("eval_strategy", translator.take("evaluation_strategy", "no")))
    steps = translator.take("eval_steps")
    if not any(rows in translator.result.values for rows in ("eval_split", "eval_data")):
        return
    if strategy == "steps":
        every = steps or translator.result.values["logging_steps"]
        translator.put("eval_steps", every, "eval_steps")
    elif strategy in ("no", "epoch"):
        translator.put("eval_strategy", strategy, key)
    else:
        translator.lose(key, f"{strategy!r} is not one of no, steps, epoch")
