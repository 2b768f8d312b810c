"""Keys of training configs in other tools, and settings of quantisers and soups in Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gym_fed.core.registries import ALGORITHMS
from gym_fed.interop.draft import Draft, KeyAlias, Unsupported
from gym_fed.interop.training_sections import SECTIONS, batch_size, near_batch


def _bitdelta(draft: Draft) -> None:
    given = draft.take("quantization")
    words = dict(given) if isinstance(given, dict) else {"method": given}
    words.pop("method")
    if (bits := words.pop("bits", 1)) != 1:
        raise draft.problem("quantization", f"bitdelta has 1 bit per weight, not {bits}", "write bits: 1")
    soup = words.pop("enable_deltasoup", None)
    draft.put("save_delta.codec", "bitdelta", "quantization")
    if "group_size" in words:
        draft.put("save_delta.group_size", words.pop("group_size"), "quantization")
    if words:
        text = "is unknown for method bitdelta, which takes bits, group_size and enable_deltasoup"
        raise draft.problem(f"quantization.{next(iter(words))}", text)
    draft.note("quantization", "`save_delta: {codec: bitdelta}`")
    if soup is not None:
        draft.note("enable_deltasoup", "not needed (every delta can go into a soup)", "quantization")


def _is_bitdelta(value: Any) -> bool:
    return value == "bitdelta" or (isinstance(value, dict) and value.get("method") == "bitdelta")


def _group_size(draft: Draft) -> None:
    algorithm = str(draft.get("algorithm") or "sft")
    groups = [name for name in ("grpo", "gspo", "rloo") if name in ALGORITHMS]
    if algorithm not in groups:
        raise draft.problem(
            "group_size",
            f"{algorithm} has no groups of answers",
            f"for {', '.join(groups)}, set num_generations; for a delta, set save_delta.group_size",
        )
    draft.move("group_size", f"{algorithm}.num_generations")


def sources(value: Any) -> list[Any]:
    """Resolve names in ``data`` to sources: files, or datasets of the catalogue or dataset_info.json."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [_source(str(item).strip()) if isinstance(item, str | Path) else item for item in items]


def _source(name: str) -> dict[str, Any]:
    from gym_fed.interop.datasets import is_catalogued, local_info

    exists = os.path.exists(name)  # Path's raises for a name that is too long
    if "://" in name or any(mark in name for mark in "*?[") or Path(name).suffix or exists:
        return {"path": name}
    if (info := local_info(name)) is not None:
        return {"dataset": name, "dataset_info": info}
    return {"name": name} if is_catalogued(name) else {"path": name}


def _is_named(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, str | Path) for item in value)
    return isinstance(value, str | Path)


def _data(key: str) -> KeyAlias:
    def read(draft: Draft) -> None:
        draft.put(key, sources(draft.take(key)), key)

    return KeyAlias(
        key,
        f"`{key}: [{{path: my.jsonl}}]`, or `name:` from the catalogue",
        read,
        _is_named,
        f"{key}: my.jsonl",
    )


_SEQUENCES = Unsupported(
    "this key does not split rows across processes",
    ("gradient_checkpointing: true", "distributed: {strategy: fsdp2}"),
)


def _sequences(draft: Draft) -> None:
    if draft.get("sequence_parallel") is not False:
        raise draft.refuse("sequence_parallel", _SEQUENCES, "sequence_parallel: true")
    draft.take("sequence_parallel")


WORDS = [
    *SECTIONS,
    KeyAlias(
        "batch_size",
        "`per_device_train_batch_size` x `gradient_accumulation_steps` x processes",
        batch_size,
        where="Python",
        shown="TrainingConfig(batch_size=2048)",
        near_only=near_batch,
    ),
    KeyAlias("use_unsloth", "unsloth"),
    KeyAlias(
        "quantization",
        "`save_delta: {codec: bitdelta}`",
        _bitdelta,
        _is_bitdelta,
        "quantization: {method: bitdelta, bits: 1, enable_deltasoup: true}",
    ),
    KeyAlias("group_size", "`grpo.num_generations`, or the same key of the algorithm in use", _group_size),
    KeyAlias("sequence_parallel", "", _sequences, shown="sequence_parallel: true", refusal=_SEQUENCES),
    _data("data"),
    _data("eval_data"),
]

NEAR = {
    "model_name_or_path": "model", "dataset_name": "data", "chat_template_path": "chat_template",
    "base_model": "model", "datasets": "data", "dataset": "data", "sequence_len": "max_length",
    "max_seq_length": "max_length", "max_seq_len": "max_length", "cutoff_len": "max_length",
    "sequence_length": "max_length", "sample_packing": "packing", "micro_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size", "per_device_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs", "num_epochs": "num_train_epochs", "n_epochs": "num_train_epochs",
    "steps": "max_steps", "num_steps": "max_steps", "max_iters": "max_steps", "lr": "learning_rate",
    "learn_rate": "learning_rate", "lr_scheduler": "lr_scheduler_type", "scheduler": "lr_scheduler_type",
    "warmup": "warmup_steps", "grad_clip": "max_grad_norm", "gradient_clipping": "max_grad_norm",
    "gradient_accumulation": "gradient_accumulation_steps", "grad_accum": "gradient_accumulation_steps",
    "optim": "optimizer", "stage": "algorithm", "method": "algorithm", "finetuning_type": "finetuning",
    "lora_r": "lora", "lora_rank": "lora", "lora_alpha": "lora", "lora_dropout": "lora", "peft": "finetuning",
    "use_peft": "finetuning", "val_set_size": "eval_split", "load_in_4bit": "quantization",
    "load_in_8bit": "quantization", "bf16": "mixed_precision", "fp16": "mixed_precision",
    "flash_attn": "attention", "template": "chat_template", "output": "output_dir", "save_dir": "output_dir",
    "random_seed": "seed", "rank": "lora", "lora.rank": "r", "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout", "lora.lora_rank": "r", "lora.lora_r": "r",
}  # fmt: skip
"""gym-fed's keys by those of TRL, Axolotl and others, for errors about unknown keys."""

NEAR_MEMBERS = {
    "optimizer": {
        "adam": "adamw", "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw_8bit", "adam8bit": "adamw_8bit", "paged_adamw_32bit": "paged_adamw",
        "galore": "galore_adamw", "apollo": "apollo_adamw", "schedule_free_adamw": "schedulefree_adamw",
        "lion_32bit": "lion", "momentum": "sgd",
    },
    "algorithm": {
        "rm": "reward_model", "reward": "reward_model", "reward_modeling": "reward_model", "pt": "pretrain",
        "pretraining": "pretrain", "cpt": "pretrain", "rl": "grpo", "rlhf": "ppo", "finetune": "sft",
    },
    "tuning method": {"qlora": "lora", "dora": "lora", "full_finetuning": "full", "none": "full"},
}  # fmt: skip
"""gym-fed's members by their names in other tools."""


def _soup_switch(draft: Draft) -> None:
    draft.drop("enable_deltasoup", "every delta can go into a soup")


BITDELTA = [
    KeyAlias(
        "enable_deltasoup",
        "not needed: every delta can go into a soup",
        _soup_switch,
        where="Python",
        shown="BitDeltaConfig(bits=1, group_size=128, safety_threshold=0.6, enable_deltasoup=True)",
    )
]


def _default_privacy(draft: Draft) -> None:
    from gym_fed.config.hub.privacy import ReleasePrivacy
    from gym_fed.privacy.accountant import NoiseEvent, epsilon

    draft.take("differential_privacy")
    privacy = ReleasePrivacy()
    event = NoiseEvent(mechanism=privacy.mechanism, noise_multiplier=privacy.noise_multiplier, count=1)
    draft.put("differential_privacy", privacy.model_dump(), "differential_privacy")
    rule = draft.get("method") or privacy.best_rule(has_root=draft.get("root") is not None)
    draft.note(
        "differential_privacy: true",
        f"method {rule}, noise_multiplier {privacy.noise_multiplier:g}, clipping_norm {privacy.clipping_norm:g}: "
        f"epsilon {epsilon([event], privacy.target_delta):.2f} at delta {privacy.target_delta:g} for one soup",
    )


DELTA_SOUP = [
    KeyAlias(
        "differential_privacy",
        "the accounted rule that keeps the most accuracy under attack, with printed defaults",
        _default_privacy,
        meant=lambda value: value is True,
        where="Python",
        shown="DeltaSoupConfig(differential_privacy=True)",
    )
]
