"""LLaMA-Factory's five groups of arguments, as ``get_train_args`` returns them and ``run_sft`` accepts them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.config.parsed import ParsedConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import validate
from gym_fed.core.aliases import note
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.interop.llamafactory.translate import translate

GROUPS = ("model", "data", "training", "finetuning", "generating")

_PREFIXES = {
    "data": ("dataset", "eval_dataset", "mix_", "preprocessing_", "tokenized_"),
    "finetuning": (
        "lora_", "freeze_", "pref_", "dpo_", "kto_", "simpo_", "ppo_", "ref_", "reward_", "galore_", "apollo_",
        "badam_", "oft_", "pissa_", "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "loraplus_",
    ),
    "model": (
        "model_", "adapter_", "quantization_", "rope_", "export_", "infer_", "vllm_", "use_unsloth", "image_",
    ),
    "generating": (
        "temperature", "top_", "num_beams", "max_new_tokens", "do_sample", "repetition_", "length_penalty",
    ),
}  # fmt: skip
_KEYS = {
    "template": "data", "cutoff_len": "data", "max_samples": "data", "train_on_prompt": "data", "mask_history": "data",
    "streaming": "data", "buffer_size": "data", "interleave_probs": "data", "overwrite_cache": "data",
    "packing": "data", "neat_packing": "data", "val_size": "data", "tool_format": "data", "default_system": "data",
    "stage": "finetuning", "finetuning_type": "finetuning", "additional_target": "finetuning",
    "pure_bf16": "finetuning",
    "use_dora": "finetuning", "use_rslora": "finetuning", "plot_loss": "finetuning", "create_new_adapter": "finetuning",
    "flash_attn": "model", "shift_attn": "model", "mixture_of_depths": "model", "enable_liger_kernel": "model",
    "trust_remote_code": "model", "cache_dir": "model", "double_quantization": "model", "resize_vocab": "model",
    "upcast_layernorm": "model", "disable_gradient_checkpointing": "model", "use_reentrant_gc": "model",
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"adapter_name_or_path": None, "quantization_bit": None},
    "data": {"template": None, "dataset": None, "dataset_dir": "data", "cutoff_len": 2048},
    "training": {
        "do_train": False,
        "do_eval": False,
        "seed": 42,
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
    },
    "finetuning": {"stage": "sft", "finetuning_type": "lora", "lora_rank": 8},
    "generating": {"do_sample": True, "temperature": 0.95, "top_p": 0.7, "max_new_tokens": 1024},
}
"""LLaMA-Factory's defaults of the keys that its own examples read."""


class Arguments:
    """A group of arguments: the given values, and LLaMA-Factory's defaults for common keys.

    Attributes:
        group: One of ``GROUPS``.
        given: The keys set by the user.
    """

    def __init__(self, group: str, given: Mapping[str, Any]) -> None:
        self.group, self.given = group, dict(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("group", "given"):
            raise AttributeError(name)
        known = {**_DEFAULTS[self.group], **self.given}
        if name in known:
            return known[name]
        raise AttributeError(f"{name} was not given; gym_fed.TrainingConfig has all defaults")

    def __repr__(self) -> str:
        return f"{self.group}: {self.given}"


def get_train_args(
    args: Mapping[str, Any] | Sequence[str] | None = None,
) -> tuple[Arguments, Arguments, Arguments, Arguments, Arguments]:
    """Return ``(model_args, data_args, training_args, finetuning_args, generating_args)``.

    Args:
        args: LLaMA-Factory's keys, or the words of a command line (``--key value``, or a YAML file and ``key=value``);
            by default the command line of this process.

    Raises:
        GymError: ``CONFIG_INVALID`` for keys without a counterpart, like ``load_training_config``.
    """
    if args is None:
        args = sys.argv[1:]
    values = dict(args) if isinstance(args, Mapping) else _from_words(list(args))
    training_config(values)
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for key, value in values.items():
        groups[_group(key)][key] = value
    model, data, training, finetuning, generating = (Arguments(group, groups[group]) for group in GROUPS)
    return model, data, training, finetuning, generating


def training_config(values: Mapping[str, Any]) -> TrainingConfig:
    """Translate LLaMA-Factory's keys to a gym-fed config.

    Raises:
        GymError: ``CONFIG_INVALID`` for keys without a counterpart, one line each.
    """
    done = translate(dict(values))
    if done.lost:
        lines = [f"{key}: no counterpart: {why}" for key, why in done.lost.items()]
        raise GymError(ErrorCode.CONFIG_INVALID, "\n".join(lines), "remove these keys")
    note("get_train_args", "`load_training_config`, which returns one TrainingConfig")
    return validate(done.values, TrainingConfig, "the arguments", None, {()})


def _group(key: str) -> str:
    if key in _KEYS:
        return _KEYS[key]
    return next((group for group, starts in _PREFIXES.items() if key.startswith(starts)), "training")


def _from_words(words: list[str]) -> dict[str, Any]:
    from gym_fed.interop.flags import plain_value, split_flags

    values: dict[str, Any] = {}
    if words and Path(words[0]).suffix in (".yaml", ".yml", ".json"):
        values = dict(ParsedConfig.read(words.pop(0)).values)
    left, flags = split_flags(words, {})
    for word in left:
        key, equals, value = word.partition("=")
        if not equals:
            remedy = "use a YAML file, --key value, or key=value"
            raise GymError(ErrorCode.USAGE, f"{word!r} is not an argument", remedy)
        flags[key] = [value]
    return {**values, **{key: plain_value(text) for key, text in flags.items()}}
