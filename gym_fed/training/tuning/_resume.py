"""Resumes an adapter that another run has trained, ours or PEFT's."""

from __future__ import annotations

import copy
from typing import Any

from gym_fed.base.modeling.adapters import CONFIG, WEIGHTS, Adapter, does_not_fit
from gym_fed.base.modeling.patterns import names_of, require_quick_patterns
from gym_fed.base.modeling.rope import apply_base_changes
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.model.quantization import require_quantised
from gym_fed.training.tuning._peft import wrap

_HEADS = ("score", "classifier")
_DROPOUTS = ("lora_dropout", "module_dropout", "boft_dropout", "vera_dropout")


def resume_adapter(model: Any, adapter: Adapter, config: TrainingConfig) -> Any:
    """Wrap ``model`` with a saved adapter, ready to be trained.

    Raises:
        GymError: ``MODEL_INVALID`` when a weight of the adapter fits nothing in the model, or one is missing;
            ``CONFIG_INVALID`` when the section names other layers than the adapter is on.
    """
    from peft import PeftConfig

    require_quantised(model, config)
    section = config.chosen_sections()[config.finetuning]
    settings: Any = PeftConfig.from_pretrained(str(adapter.folder))
    settings.inference_mode = False
    settings.base_model_name_or_path = None  # the name is written when the run is saved
    for key in _DROPOUTS:
        if hasattr(section, key):
            setattr(settings, key, getattr(section, key))
    if settings.modules_to_save:
        present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        names = [name for name in settings.modules_to_save if name not in _HEADS or name in present]
        settings.modules_to_save = names or None
    apply_base_changes(model, adapter.folder)
    _require_layers(model, settings, adapter, config)
    adapted = wrap(model, settings, config.finetuning, seed=config.seed)
    _require_plain_head(adapted, adapter)
    _load(adapted, adapter)
    if getattr(section, "lora_fa", False) or getattr(section, "freeze_a", False):
        for name, value in adapted.named_parameters():
            if "lora_A" in name:
                value.requires_grad_(False)
    return adapted


def _require_plain_head(adapted: Any, adapter: Adapter) -> None:
    """Refuse an adapter on single tokens of tied embeddings: PEFT wraps the output head too, which TRL cannot read."""
    head = adapted.get_base_model().get_output_embeddings()
    if adapter.config.get("trainable_token_indices") and head is not None and not hasattr(head, "bias"):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"adapter: {adapter.name} has trainable_token_indices, and the model's output head is its embedding",
            "set new_adapter: true to merge that adapter and train another",
        )


def _load(adapted: Any, adapter: Adapter) -> None:
    """Load every weight of the adapter, and refuse missing and unknown ones."""
    import torch
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = type(adapted.get_base_model()).__name__
    try:
        weights = load_file(adapter.folder / WEIGHTS)
    except SafetensorError as error:
        raise does_not_fit(adapter, name, f"{WEIGHTS} cannot be read: {error}") from error
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if missing := sorted(expected.keys() - weights.keys()):
        raise does_not_fit(adapter, name, f"it lacks {len(missing)} weights, such as {missing[0]}")
    for key in sorted(weights.keys() - expected.keys()):
        # PEFT also writes the base's embeddings if an adapter is on them.
        own = adapted.state_dict().get(key)
        if (
            own is None
            or own.shape != weights[key].shape
            or not torch.equal(own.cpu(), weights[key].to(own.dtype))
        ):
            raise does_not_fit(adapter, name, f"it holds {key}, which the model has not, or otherwise")
        del weights[key]
    for key, value in expected.items():
        if value.shape != weights[key].shape:
            shapes = f"{list(weights[key].shape)}, and the model wants {list(value.shape)}"
            raise does_not_fit(adapter, name, f"{key} is {shapes}")
    set_peft_model_state_dict(adapted, weights)


def _require_layers(model: Any, settings: Any, adapter: Adapter, config: TrainingConfig) -> None:
    """Refuse a section that names other layers of the plain ``model`` than the adapter has."""
    section = config.chosen_sections()[config.finetuning]
    own = adapter.config.get("target_modules")
    names = names_of(model)
    require_quick_patterns(section.model_dump(), names, config.finetuning)
    require_quick_patterns(adapter.config, names, str(adapter.folder / CONFIG))
    if _names(section.target_modules) == _names(own):
        return
    odd = sorted(_layers(model, settings, section.target_modules) ^ _layers(model, settings, own))
    if odd:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{config.finetuning}.target_modules: is {_names(section.target_modules)!r}, but the adapter "
            f"{adapter.name} is on {_names(own)!r}; {odd[0]} has it in one of them",
            "remove the key, or set new_adapter: true to merge that adapter and train another",
        )


def _names(targets: Any) -> Any:
    return targets if isinstance(targets, str) or targets is None else sorted(targets)


def _layers(model: Any, settings: Any, targets: Any) -> set[str]:
    """Return the names of the layers that ``targets`` chooses."""
    import torch
    from peft.tuners.tuners_utils import check_target_module_exists

    chosen = copy.copy(settings)
    chosen.target_modules = targets if isinstance(targets, str) or targets is None else set(targets)
    named = dict(model.named_modules())
    if targets == "all-linear":
        heads = [model.get_output_embeddings(), *(getattr(model, name, None) for name in _HEADS)]
        return {
            name
            for name, module in named.items()
            if isinstance(module, torch.nn.Linear) and not any(module is head for head in heads)
        }
    return {name for name in named if check_target_module_exists(chosen, name)}
