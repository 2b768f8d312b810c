"""Translate files of LLaMA-Factory's version 1: other keys, plug-ins in sections, and data listed in a YAML file.

Its command decides what is trained (``sft``, ``dpo``, ``rm``); here the file alone decides, by its rows and its
``model_class``. Omitted values get that version's defaults, which differ from those of version 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.parsed import Translation
from gym_fed.config.yaml.strict import parse_config, read_config_text
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.interop.llamafactory.compute import offloading, shard
from gym_fed.interop.llamafactory.stages import translate_preference
from gym_fed.interop.llamafactory.translation import Translator, names

_SECTIONS = (
    *("peft_config", "kernel_config", "dist_config", "quant_config", "optim_config"),
    *("lr_scheduler_config", "init_config"),
)
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2"}
_STRATEGIES = ("fsdp2", "deepspeed", "fsdpturbo")
_PAIRS_ONLY = ("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "ld_alpha")

NOT_NEEDED = {
    "trust_remote_code": "code shipped with a model is never run; transformers must support its architecture",
    "sample_backend": "for sampling only",
    "max_new_tokens": "for sampling only",
    "batching_workers": "the tokenizer already uses all cores",
    "dp_size": "computed from the number of processes",
    "mp_shard_size": "computed from the number of processes",
    "cp_mode": "rows are not split across processes",
    "save_ckpt_as_hf": "checkpoints include the optimiser state, so that a run can resume",
    "full_determinism": "see reproducibility.deterministic",
    "dist_timeout": "see distributed.timeout_seconds",
}
_PREFIXES = {
    "kernel_config.": "kernels affect speed, not results",
    "init_config.": "how weights are initialised in memory does not affect results",
    "dist_config.": "how weights are sharded does not affect results",
}


def translate_version_1(given: dict[str, Any], processes: int | None = None) -> Translation:
    """Translate the values of one file; see ``translate``. Reads the YAML file of its dataset."""
    translator = Translator(_flat(given))
    translator.move("model", "model")
    algorithm = _algorithm(translator)
    _data(translator)
    _compute(translator)
    _tuning(translator)
    _without_dropout(translator, algorithm)
    _optimizer(translator)
    _schedule(translator)
    _distributed(translator, processes)
    translator.put("algorithm", algorithm)
    translator.leave(NOT_NEEDED, _PREFIXES)
    return translator.result


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """Flatten ``{"peft_config": {"r": 8}}`` to ``{"peft_config.r": 8}``, without null sections."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SECTIONS and isinstance(value, dict):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif key not in _SECTIONS or value is not None:
            flat[key] = value
    return flat


def _algorithm(translator: Translator) -> str:
    kind = str(translator.take("model_class", "llm"))
    file = translator.take("train_dataset")
    translator.has("eval_dataset")
    pairs = file is not None and _holds_pairs(Path(str(file)))
    if kind == "cls":
        algorithm = "reward_model"
    elif kind != "llm":
        translator.lose("model_class", f"{kind!r} is not supported; use llm or cls")
        return "sft"
    elif pairs or any(translator.has(key) for key in _PAIRS_ONLY):
        algorithm = translate_preference(translator)
        translator.note(
            "train_dataset", f"the rows are pairs: {algorithm} is used; to change this: --set algorithm=X"
        )
    else:
        algorithm = "sft"
    for key in _PAIRS_ONLY:
        if key in translator.untaken():
            translator.take(key)
            translator.note(key, f"not used by {algorithm}")
    return algorithm


def _data(translator: Translator) -> None:
    for key, ours in (("train_dataset", "data"), ("eval_dataset", "eval_data")):
        if (file := translator.take(key)) is None:
            continue
        sources, remarks = _sources_of(str(file))
        translator.put(ours, sources, key)
        if remarks:
            translator.note(key, "; ".join(remarks))
    translator.move("cutoff_len", "max_length", 2048)
    template = translator.take("custom_chat_template")
    if template is not None:
        translator.put("chat_template", str(template), "custom_chat_template")
    strategy = str(translator.take("batching_strategy", "normal"))
    if strategy == "padding_free":
        translator.note("batching_strategy", "batches are padded; the result is the same")
    elif strategy in ("dynamic_batching", "dynamic_padding_free"):
        translator.put("packing", "bfd", "batching_strategy")
        translator.note(
            "batching_strategy",
            "unsplit rows are packed into rows of cutoff_len tokens and do not attend to each other; micro_batch_size "
            "counts packed rows",
        )
    elif strategy != "normal":
        translator.lose("batching_strategy", f"{strategy!r} is unknown")


def _compute(translator: Translator) -> None:
    attention = str(translator.take("flash_attn", "sdpa"))
    if attention not in _ATTENTION:
        translator.lose("flash_attn", f"{attention!r} is not one of {', '.join(_ATTENTION)}")
    elif attention != "sdpa":
        translator.put("attention", _ATTENTION[attention], "flash_attn")
    if translator.take("bf16", True):
        translator.put("mixed_precision", "bf16", "bf16")
    translator.move("enable_activation_checkpointing", "gradient_checkpointing", True)
    kernels = names(translator.take("kernel_config.name", "auto"))
    if "liger_kernel" in kernels:
        translator.put("liger", True, "kernel_config.name")
    if others := [name for name in kernels if name not in ("auto", "liger_kernel")]:
        translator.note("kernel_config.name", f"{', '.join(others)}: kernels affect speed, not results")
    translator.take("init_config.name")
    if (rows := translator.take("cp_size", 1)) != 1:
        why = (
            f"{rows}: to split rows, use distributed.strategy sequence_parallel, which does not shard weights"
        )
        translator.lose("cp_size", why)


def _tuning(translator: Translator) -> None:
    method = translator.take("peft_config.name")
    if method is None:
        translator.put("finetuning", "full")
    elif method == "lora":
        _lora(translator)
    elif method == "freeze":
        translator.put("finetuning", "freeze", "peft_config.name")
        translator.move("peft_config.freeze_trainable_layers", "freeze.num_trainable_layers", 2)
        for key, ours in (("trainable", "trainable_modules"), ("extra", "extra_modules")):
            chosen = translator.take(f"peft_config.freeze_{key}_modules")
            if chosen and chosen != "all":
                translator.put(f"freeze.{ours}", names(chosen), f"peft_config.freeze_{key}_modules")
        translator.take("peft_config.cast_trainable_params_to_fp32")
    else:
        translator.lose("peft_config.name", f"{method!r} is not one of lora, freeze")
    _quantization(translator)


def _lora(translator: Translator) -> None:
    translator.put("finetuning", "lora", "peft_config.name")
    section = "peft_config"
    for key, ours, default in (
        ("r", "r", 8),
        ("lora_alpha", "lora_alpha", 16),
        ("lora_dropout", "lora_dropout", 0.05),
        ("use_rslora", "use_rslora", None),
        ("use_dora", "use_dora", None),
        ("modules_to_save", "modules_to_save", None),
    ):
        translator.move(f"{section}.{key}", f"lora.{ours}", default)
    targets = translator.take(f"{section}.target_modules", "all")
    modules = "all-linear" if targets == "all" else names(targets)
    translator.put("lora.target_modules", modules, f"{section}.target_modules")
    for key in ("export_dir", "export_size", "infer_dtype", "export_hub_model_id", "export_legacy_format"):
        if translator.take(f"{section}.{key}") is not None:
            translator.note(f"{section}.{key}", "used only by gym export")


def _without_dropout(translator: Translator, algorithm: str) -> None:
    """Disable dropout for algorithms on pairs, as in LLaMA-Factory."""
    section = translator.result.values.get("lora", {})
    if algorithm in ("dpo", "orpo", "simpo") and section.get("lora_dropout"):
        section["lora_dropout"] = 0.0
        translator.note("peft_config.lora_dropout", f"{algorithm} disables dropout")


def _quantization(translator: Translator) -> None:
    name, bits = translator.take("quant_config.name"), translator.take("quant_config.quantization_bit")
    kind = translator.take("quant_config.quantization_type", "nf4")
    double = translator.take("quant_config.double_quantization", True)
    product = str(translator.take("quant_config.compute_dtype", "float16"))
    if name is None or (name == "auto" and bits is None):
        return
    if name not in ("auto", "bnb"):
        translator.lose("quant_config.name", f"{name!r} is not one of auto, bnb")
        return
    translator.put("quantization.bits", bits or 4, "quant_config.quantization_bit")
    if (bits or 4) == 4:
        translator.put("quantization.quant_type", kind, "quant_config.quantization_type")
        translator.put("quantization.double_quant", double, "quant_config.double_quantization")
        bf16 = translator.result.values.get("mixed_precision") == "bf16"
        dtype = "bfloat16" if bf16 else product
        translator.put("quantization.compute_dtype", dtype, "quant_config.compute_dtype")


def _optimizer(translator: Translator) -> None:
    """Translate the optimizer: torch's AdamW with its defaults, or Muon."""
    name = translator.take("optim_config.name")
    if name is None:
        translator.put("optimizer", "adamw")
        translator.put("weight_decay", 0.01)
        return
    if name != "muon":
        translator.lose("optim_config.name", f"{name!r} is unknown; version 1 has only muon")
        return
    translator.put("optimizer", "muon", "optim_config.name")
    translator.move("optim_config.wd", "weight_decay", 0.1)
    for key, default in (("momentum", 0.95), ("nesterov", True), ("ns_steps", 5)):
        translator.move(f"optim_config.{key}", f"optimizer_args.{key}", default)
    betas = translator.take("optim_config.adamw_betas", [0.9, 0.95])
    translator.put("adam_beta1", betas[0], "optim_config.adamw_betas")
    translator.put("adam_beta2", betas[1], "optim_config.adamw_betas")
    translator.move("optim_config.adamw_eps", "optimizer_args.adamw_eps", 1e-8)
    if translator.take("optim_config.lr") is not None:
        translator.note("optim_config.lr", "learning_rate is used, as in LLaMA-Factory")


def _schedule(translator: Translator) -> None:
    translator.move("learning_rate", "learning_rate", 1e-4)
    if (schedule := translator.take("lr_scheduler_config.name")) is None:
        translator.put("lr_scheduler_type", "constant")
    else:
        translator.lose("lr_scheduler_config.name", f"{schedule!r} is a plug-in; use our lr_scheduler_type")
    translator.move("num_train_epochs", "num_train_epochs", 3)
    translator.move("max_steps", "max_steps")
    translator.move("max_grad_norm", "max_grad_norm", 1.0)
    translator.move("micro_batch_size", "per_device_train_batch_size", 1)
    translator.move("output_dir", "output_dir")
    translator.move("seed", "seed", 42)
    translator.move("logging_steps", "logging_steps", 1)
    translator.put("save_steps", translator.take("save_steps", 0), "save_steps")
    translator.move("save_total_limit", "save_total_limit")
    epochs = translator.take("save_epochs")
    if epochs is not None:
        translator.lose("save_epochs", "checkpoints are saved every N steps; use save_steps")
    translator.move("resume_from_checkpoint", "resume_from_checkpoint")


def _distributed(translator: Translator, processes: int | None) -> None:
    name = translator.take("dist_config.name")
    file = translator.take("dist_config.config_file")
    batch, micro = translator.take("global_batch_size"), translator.take("micro_batch_size", 1)
    if batch is not None:
        share = micro * (processes or 1)
        if batch % share:
            problem = f"{batch} is not a multiple of the {counted(share, 'row')} of one step"
            translator.lose("global_batch_size", problem)
        else:
            translator.put("gradient_accumulation_steps", batch // share, "global_batch_size")
        if processes is None:
            translator.note("global_batch_size", "computed for one process")
    translator.lose_if("mp_replicate_size", "weights are sharded over all processes", harmless=(1,))
    if name is None:
        return
    if name not in _STRATEGIES:
        translator.lose("dist_config.name", f"{name!r} is not one of {', '.join(_STRATEGIES)}")
    elif name == "deepspeed":
        offloading(translator, "dist_config.config_file", str(file), processes)
    elif name == "fsdp2":
        shard(translator, "dist_config.name", {"strategy": "fsdp2"}, processes)
    elif processes != 1:
        translator.lose("dist_config.name", "fsdpturbo's parallel experts are not supported; use fsdp2")
    else:
        translator.note("dist_config.name", "a single process has nothing to shard")


_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
_KEYS = ("path", "source", "split", "converter", "size", "weight", "streaming")


def _sources_of(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the entries of gym-fed's ``data``, and notes on differences.

    Raises:
        GymError: ``CONFIG_INVALID`` with line for an entry that cannot be read in the same way; ``FILE_NOT_FOUND``.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return ([{"path": name}] if path.exists() else [{"hub": name}]), []
    entries, marks = parse_config(path, read_config_text(path))
    sources: list[dict[str, Any]] = []
    remarks: list[str] = []
    for entry, settings in entries.items():
        line, column = marks[(entry,)]
        where = f"{path}:{line}:{column}: {entry}"
        if not isinstance(settings, dict) or "path" not in settings:
            raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: path is missing")
        if unknown := [key for key in settings if key not in _KEYS]:
            raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: unknown key {unknown[0]!r}")
        source, remark = _source(where, settings)
        sources.append(source)
        remarks += [f"{entry}: {text}" for text in remark]
    return sources, remarks


def _holds_pairs(file: Path) -> bool:
    """Return True if the rows are pairs of a chosen and a rejected answer, by their converter or the first row."""
    if file.suffix not in (".yaml", ".yml"):
        return _first_is_a_pair(file)
    entries, _ = parse_config(file, read_config_text(file))
    return any(
        settings.get("converter") == "pair"
        or (settings.get("converter") is None and _first_is_a_pair(Path(str(settings.get("path")))))
        for settings in entries.values()
        if isinstance(settings, dict)
    )


def _source(where: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kind, converter = settings.get("source", "hf_hub"), settings.get("converter")
    if kind not in ("hf_hub", "local"):
        raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: source {kind!r} is not one of hf_hub, local")
    if converter is not None and converter not in _FORMATS:
        problem = f"{where}: converter {converter!r} is not one of {', '.join(_FORMATS)}"
        raise GymError(ErrorCode.CONFIG_INVALID, problem)
    source: dict[str, Any] = {"path" if kind == "local" else "hub": str(settings["path"])}
    remarks: list[str] = []
    if kind == "hf_hub" and "split" in settings:
        source["split"] = str(settings["split"])
    if converter is not None:
        source["format"] = _FORMATS[converter]
    if (size := settings.get("size")) is not None:
        source["num_examples"] = size
        remarks.append(f"size {size}: the first rows are used; LLaMA-Factory draws as many with replacement")
    if (weight := settings.get("weight")) is not None:
        source["weight"] = weight
    if settings.get("streaming"):
        remarks.append("rows are stored once, memory-mapped, and fully shuffled")
    return source, remarks


def _first_is_a_pair(path: Path) -> bool:
    """Return True if the first row of a local file is a pair; False for a missing file, which is refused later."""
    from gym_fed.data.files import find_files, read_raw

    if not path.is_file():
        return False
    first = next((row for file in find_files(path) for _, row in read_raw(file)), None)
    return isinstance(first, dict) and ("chosen_messages" in first or {"chosen", "rejected"} <= first.keys())
