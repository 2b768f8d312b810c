"""Resolve and check the adapters that a run starts from: those merged into its base, and the one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapter_base import require_base
from gym_fed.base.modeling.adapters import (
    Adapter,
    in_order,
    merge_adapters,
    read_adapter,
    require_mergeable,
    require_of_weights,
)
from gym_fed.base.models import folder_here, resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS, TUNING

_RUN_KEYS = (
    *("lora_dropout", "module_dropout", "boft_dropout", "vera_dropout"),
    *("loraplus_lr_ratio", "lora_fa", "freeze_a", "loftq_iter"),
)
"""Training settings of an adapter, which may differ from run to run."""
_NEW_ADAPTER = "set new_adapter: true to merge it and train a new one"
_HEADS = ("score", "classifier")
"""Names that PEFT adds to every adapter of a model with a classification head."""


def starting_adapters(config: TrainingConfig) -> list[Adapter]:
    """Return all adapters that are applied to the base before the first step, in order, including their dependencies.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID`` for an adapter that is missing or unreadable;
            ``CONFIG_INVALID`` if they are not in the order in which they were trained.
    """
    return in_order([read_adapter(name, Path(resolve(name))) for name in config.adapter])


def continued_adapter(config: TrainingConfig) -> Adapter | None:
    """Return the saved adapter that the run trains further; None if it trains a new one."""
    if not config.adapter or config.new_adapter or not TUNING.type_of(config.finetuning).is_adapter:
        return None
    return starting_adapters(config)[-1]


def merged_first(config: TrainingConfig) -> list[Adapter]:
    """Return the adapters that are merged into the base before the first step."""
    adapters = starting_adapters(config)
    return adapters[:-1] if continued_adapter(config) is not None else adapters


def merge_starting_adapters(model: Any, config: TrainingConfig) -> Any:
    """Merge the adapters of ``merged_first`` into the loaded base."""
    return merge_adapters(model, merged_first(config))


def adapter_digests(config: TrainingConfig) -> list[str]:
    """Return the SHA-256 of each adapter that the run starts from or uses as a reference, in order."""
    named = [read_adapter(name, Path(resolve(name))) for name in config.reference_adapter]
    return [adapter.sha256 for adapter in (*starting_adapters(config), *named)]


def require_none_merged(config: TrainingConfig) -> None:
    """Refuse to merge an adapter into a model in memory, because that model belongs to the caller."""
    for adapter in merged_first(config):
        reason = f"adapter: {adapter.name} would be merged into the model in memory"
        raise GymError(ErrorCode.USAGE, reason, "merge it first, or pass model: NAME instead of a model")


def resolve_adapters(config: TrainingConfig) -> TrainingConfig:
    """Set unset keys of the tuning section from the adapter that the run trains further.

    The run's ``config.yaml`` then describes that adapter.

    Raises:
        GymError: ``CONFIG_INVALID`` with both values if the section contradicts the adapter.
    """
    adapter = continued_adapter(config)
    if adapter is None:
        return config
    require_of_weights(adapter)
    _require_kind(adapter, config)
    section = config.chosen_sections()[config.finetuning]
    trained = {
        key: _plain(adapter.config[key], getattr(section, key))
        for key in type(section).model_fields
        if key in adapter.config and key not in _RUN_KEYS and key != "init_lora_weights"
    }
    remedy = "remove the key, or set new_adapter: true to merge that adapter and train a new one"
    # target_modules is compared layer by layer in resume_adapter.
    for key in section.model_fields_set & trained.keys() - {"target_modules"}:
        own_value = _plain(getattr(section, key), None)
        reason = (
            f"{config.finetuning}.{key} is {own_value!r}, but the adapter {adapter.name} has {trained[key]!r}"
        )
        refuse_first((own_value != trained[key], reason, remedy))
    start = getattr(section, "init_lora_weights", "default")
    reason = f"lora.init_lora_weights is {start}, but the adapter {adapter.name} is already trained"
    refuse_first((start != "default", reason, remedy))
    taken = {
        key: value
        for key, value in trained.items()
        if key not in section.model_fields_set and not (value is None and getattr(section, key) is not None)
    }
    return config.model_copy(update={config.finetuning: section.model_copy(update=taken)})


def _plain(value: Any, like: Any) -> Any:
    """Normalise a value of a PEFT config, in which empty lists are null and sets are unordered."""
    if value is None and isinstance(like, list | dict):
        return type(like)()
    if isinstance(value, list | tuple | set):
        return sorted(name for name in value if name not in _HEADS)
    return value


def check_adapters(config: TrainingConfig) -> None:
    """Refuse adapters that do not fit the base, the tuning method or each other, before loading."""
    if not config.adapter:
        return
    from gym_fed.base.modeling.weight_count import prequantised

    adapters, merged = starting_adapters(config), merged_first(config)
    for key, value in (("unsloth", config.unsloth), ("distributed", config.distributed)):
        reason = f"adapter: incompatible with {key}, which loads the base in a different way"
        remedy = f"remove {key}, or merge the adapters first with: gym export"
        refuse_first((value and getattr(value, "strategy", "") != "ddp", reason, remedy))
    for adapter in adapters:
        require_of_weights(adapter)
    for adapter in merged:
        require_mergeable(adapter)
    if config.model is not None:
        for adapter in adapters:
            require_base(adapter, config.model, (folder_here(adapter.base), folder_here(config.model)))
    task: str = ALGORITHMS.type_of(config.algorithm).task_type
    continued = continued_adapter(config)
    for adapter in adapters:
        saved = adapter.config.get("task_type")
        expected = task if adapter is adapters[-1] and continued is not None else "CAUSAL_LM"
        reason = f"{adapter.name} has task_type {saved}, but {config.algorithm} needs {expected}"
        remedy = "use it only with reward_model" if saved == "SEQ_CLS" else _NEW_ADAPTER
        refuse_first((saved not in (None, expected), reason, remedy), prefix="adapter: ")
    if merged:
        quantised = "quantization is set" if config.quantization is not None else prequantised(config.model)
        reason = f"{merged[0].name} would be merged into quantised weights ({quantised}), which is not exact"
        remedy = (
            "pass one adapter to train, or merge the others into the unquantised base first with: gym export"
        )
        refuse_first((quantised, reason, remedy), prefix="adapter: ")
    resolve_adapters(config)


def _require_kind(adapter: Adapter, config: TrainingConfig) -> None:
    kinds = {name.upper(): name for name in TUNING.own() if TUNING.type_of(name).is_adapter}
    kind = kinds.get(adapter.kind)
    other = f"finetuning: {config.finetuning}, but the adapter {adapter.name} is {kind or adapter.kind}"
    fixed = f"adapter: {adapter.name} is an adalora adapter, whose ranks were fixed at the end of its run"
    remedy = f"set finetuning: {kind}, or new_adapter: true" if kind else "set new_adapter: true"
    refuse_first((kind != config.finetuning, other, remedy), (kind == "adalora", fixed, _NEW_ADAPTER))
