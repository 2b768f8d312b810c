"""Wrap a model with a new or saved PEFT adapter; errors refer to the keys of the config."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

from gym_fed.base.modeling.adapter_limits import bounded_tensors
from gym_fed.base.modeling.adapter_names import own_names_kept
from gym_fed.base.modeling.adapters import CONFIG, WEIGHTS, Adapter, does_not_fit
from gym_fed.base.modeling.patterns import names_of, require_quick_patterns
from gym_fed.base.modeling.rope import apply_base_changes
from gym_fed.base.modeling.unadapted import unadapted_names
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.training.model.packed_layers import packed_names
from gym_fed.training.model.quantization import require_quantised
from gym_fed.training.vision.parts import frozen_parts, narrow_targets

_MODULE_KEYS = {
    "modules_to_save": False,
    "exclude_modules": False,
    "rank_pattern": True,
    "alpha_pattern": True,
}
"""Settings that contain module names, and whether they accept regular expressions."""

_CONVERTED_ROUTER = "gate.weight"
"""PEFT's name for the router of Mixtral, Qwen3-MoE and similar models."""

_HEADS = ("score", "classifier")
_DROPOUTS = ("lora_dropout", "module_dropout", "boft_dropout", "vera_dropout")


def wrap_for(model: Any, peft_config: Any, config: TrainingConfig) -> Any:
    """Call ``wrap`` with the section of the configured method. Refuse a base that is not quantised as configured."""
    require_quantised(model, config)
    frozen = frozen_parts(model, config)
    return wrap(model, peft_config, config.finetuning, seed=config.seed, frozen=frozen)


def wrap(
    model: Any,
    peft_config: Any,
    section: str,
    *,
    seed: int,
    frozen: frozenset[str] = frozenset(),
    fused_experts: bool = True,
    needs_layers: str | None = None,
) -> Any:
    """Wrap ``model`` in a ``peft.PeftModel``, which freezes and shares its weights.

    Args:
        model: A ``transformers`` model.
        peft_config: A ``peft.PeftConfig``; not changed.
        section: The section of the config, for error messages.
        seed: Seed of the random factors.
        frozen: Parts without adapters, in a model that reads images; see ``vision.parts.frozen_parts``.
        fused_experts: False to exclude fused experts from ``all-linear``, and to refuse their names.
        needs_layers: A setting that PEFT supports only for layers; it is refused with fused experts.

    Raises:
        GymError: ``CONFIG_INVALID`` if the settings match no layer of the model, or if PEFT would change them.
    """
    from peft import get_peft_model
    from transformers import set_seed

    from gym_fed.training.model.quantization import settle

    peft_config = copy.deepcopy(peft_config)  # PEFT changes its lists, which may belong to the run's config
    own_patterns = any(getattr(peft_config, key, None) for key in ("rank_pattern", "alpha_pattern"))
    require_quick_patterns(peft_config.to_dict(), names_of(model), section)
    _exclude_unadapted(model, peft_config)
    if peft_config.target_modules == "all-linear" and (packed := packed_names(model)):
        peft_config.target_modules = set(packed)
    _require_modules(model, peft_config, section)
    _require_parameters(model, peft_config, section)
    narrow_targets(model, peft_config, frozen, section)
    _convert_experts(model, peft_config, section, fused_experts)
    if getattr(peft_config, "target_parameters", None):
        own_patterns = False  # PEFT matches patterns against layers, not parameters
        fused = f"parameters such as the fused experts of {type(model).__name__}"
        reason = f"{section}.{needs_layers}: PEFT does not support it for {fused}"
        remedy = (
            f"remove it, or adapt no experts: {section}.fused_experts: false with target_modules: all-linear"
        )
        refuse_first((needs_layers is not None, reason, remedy))
    settle(model)
    set_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="You have passed exclude_modules")
            # If the config has no patterns, this warning is about PEFT's own patterns for routed experts.
            unmatched = "The following .*_pattern keys did not match"
            warnings.filterwarnings("error" if own_patterns else "ignore", message=unmatched)
            # The warning is about merging into packed weights, but gym-fed merges into the unquantised base.
            warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated")
            warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a deprecated name of transformers
            # Otherwise PEFT would silently replace an invalid size.
            warnings.filterwarnings("error", message="Invalid `.*_block_size`")
            return get_peft_model(model, peft_config)
    except (ValueError, UserWarning, RuntimeWarning, re.error) as error:
        first, kind = str(error).strip().splitlines()[0], type(model).__name__
        if isinstance(error, re.error):
            problem = f"{section}.target_modules: {error.pattern!r} is not a regular expression: {first}"
            hint = "correct it, or list the names"
        elif "did not match" in first or "exclude_modules" in first:
            problem = f"{section}: {first}"
            hint = "list only modules that are in target_modules, or remove the key"
        elif "is incompatible with" in first:
            problem = f"{section}.target_modules: {first.partition('. ')[0]}"
            hint = "remove it, or use all-linear"
        elif "arget modules" in first or "target_modules" in first:
            targets = peft_config.target_modules
            shown = repr(sorted(targets) if isinstance(targets, set) else targets)
            problem = f"{section}.target_modules: {shown} matches no layer of {kind}"
            hint = "use all-linear, or names such as q_proj and v_proj"
        else:
            problem = f"{section}: does not fit {kind}: {first}"
            hint = f"change the sizes in {section}, or its target_modules"
        raise GymError(ErrorCode.CONFIG_INVALID, problem, hint) from error


def resume_adapter(model: Any, adapter: Adapter, config: TrainingConfig) -> Any:
    """Wrap ``model`` with a saved adapter for further training.

    Raises:
        GymError: ``MODEL_INVALID`` if a weight of the adapter is missing or does not fit the model; ``CONFIG_INVALID``
            if the section specifies other layers.
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
    with bounded_tensors(model, adapter.name):
        adapted = wrap(model, settings, config.finetuning, seed=config.seed)
    _require_plain_head(adapted, adapter)
    _load(adapted, adapter)
    if getattr(section, "lora_fa", False) or getattr(section, "freeze_a", False):
        for name, value in adapted.named_parameters():
            if "lora_A" in name:
                value.requires_grad_(False)
    return adapted


def peft_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return keyword arguments for a ``peft.PeftConfig``, from the section of the configured method."""
    section = config.chosen_sections()[config.finetuning].model_dump()
    return {**section, "modules_to_save": section["modules_to_save"] or None, "task_type": task_type(config)}


def task_type(config: TrainingConfig) -> str:
    """Return PEFT's name for the task of the algorithm's model."""
    task: str = ALGORITHMS.type_of(config.algorithm).task_type
    return task


def require_head_without_adapter(model: Any, config: TrainingConfig) -> None:
    """Refuse an adapter on the output head, which TRL's losses would ignore."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = model.get_output_embeddings() if hasattr(model, "peft_config") else None
    if not isinstance(head, BaseTunerLayer):
        return
    key = f"{config.finetuning}.target_modules"
    hint = "put it into modules_to_save, which trains the whole module"
    if config.adapter and not config.new_adapter:
        key, hint = f"adapter: {config.adapter[-1]}", "set new_adapter: true to merge it and train a new one"
    reason = f"{key} includes the output head, but the loss of {config.algorithm} ignores adapters on it"
    raise GymError(ErrorCode.CONFIG_INVALID, reason, hint)


def _exclude_unadapted(model: Any, peft_config: Any) -> None:
    """Exclude ``unadapted_names`` from ``all-linear``. Layers that ``target_modules`` names explicitly get adapters."""
    excluded = getattr(peft_config, "exclude_modules", None) or []
    if peft_config.target_modules == "all-linear" and not isinstance(excluded, str):
        names = sorted({*excluded, *unadapted_names(model)})
        if names:
            peft_config.exclude_modules = names


def _convert_experts(model: Any, peft_config: Any, section: str, fused_experts: bool) -> None:
    """Convert targets in experts that transformers 5 fuses to parameters, like PEFT but without the router.

    ``exclude_modules`` would not exclude the router. PEFT's own conversion later changes nothing more, and adds no
    router if ``narrow_targets`` has listed layers by name.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    all_linear = peft_config.target_modules == "all-linear"
    given = {*(getattr(peft_config, "target_parameters", None) or ())}
    try:
        convert_peft_config_for_transformers(peft_config, model, None)
    except ValueError as error:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{section}.target_modules: {error}",
            "name all layers of the experts, or use all-linear",
        ) from error
    added = {*(getattr(peft_config, "target_parameters", None) or ())} - given
    if all_linear and added:
        peft_config.target_parameters = given | (added - {_CONVERTED_ROUTER} if fused_experts else set())
    elif added and not fused_experts:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{section}.target_modules includes {', '.join(sorted(added))} of {type(model).__name__}, which cannot "
            "be adapted with fused_experts: false (always set in federated rounds)",
            f"set {section}.target_modules to attention layers, or to all-linear",
        )


def _require_modules(model: Any, peft_config: Any, section: str) -> None:
    """Refuse names of modules that the model does not have; PEFT would ignore them, or refuse them too late."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]  # routed experts are a parameter, not modules
    for key, is_pattern in _MODULE_KEYS.items():
        names = [*modules, *parameters] if is_pattern else modules
        for module_name in getattr(peft_config, key, None) or ():
            pattern = module_name if is_pattern else re.escape(module_name)
            try:
                is_present = any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
            except re.error as error:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"{section}.{key}: {module_name!r} is not a regular expression: {error}",
                    "correct it, or use a module's name",
                ) from error
            reason = f"{section}.{key}: {type(model).__name__} has no module {module_name!r}"
            remedy = "use names such as q_proj, embed_tokens or norm, or remove it"
            refuse_first((not is_present, reason, remedy))


def _require_parameters(model: Any, peft_config: Any, section: str) -> None:
    """Refuse ``target_parameters`` that are not matrices or are not in the model, which PEFT may ignore."""
    parameters = dict(model.named_parameters())
    for suffix in getattr(peft_config, "target_parameters", None) or ():
        matches = [value for name, value in parameters.items() if f".{name}".endswith(f".{suffix}")]
        no_experts = "it has no fused experts; remove the key"
        fused = (name for name, value in parameters.items() if value.dim() == 3)
        experts = sorted({name.rpartition("layers.")[2].partition(".")[2] for name in fused})
        remedy = f"its fused experts are {', '.join(experts)}" if experts else no_experts
        where, kind = f"{section}.target_parameters", type(model).__name__
        odd = next((tuple(value.shape) for value in matches if value.dim() not in (2, 3)), None)
        refuse_first(
            (not matches, f"{where}: {kind} has no parameter {suffix!r}", remedy),
            (
                odd is not None,
                f"{where}: {suffix!r} of {kind} has the shape {odd}, so it is not a matrix",
                remedy,
            ),
        )


def _require_plain_head(adapted: Any, adapter: Adapter) -> None:
    """Refuse an adapter on single tokens of tied embeddings: PEFT also wraps the output head, which TRL cannot read."""
    head = adapted.get_base_model().get_output_embeddings()
    if adapter.config.get("trainable_token_indices") and head is not None and not hasattr(head, "bias"):
        reason = f"adapter: {adapter.name} has trainable_token_indices, but the model's output head is tied"
        remedy = "set new_adapter: true to merge that adapter and train a new one"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)


def _load(adapted: Any, adapter: Adapter) -> None:
    """Load every weight of the adapter; refuse missing and unknown weights."""
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
        raise does_not_fit(adapter, name, f"it lacks {counted(len(missing), 'weight')}, such as {missing[0]}")
    for key in sorted(weights.keys() - expected.keys()):
        # PEFT also saves the base's embeddings if an adapter is on them.
        own = adapted.state_dict().get(key)
        value = weights.pop(key)
        if own is None or own.shape != value.shape or not torch.equal(own.cpu(), value.to(own.dtype)):
            reason = (
                f"it contains {key}, which the model lacks, or has with a different shape or other values"
            )
            raise does_not_fit(adapter, name, reason)
    for key, value in expected.items():
        if value.shape != weights[key].shape:
            shapes = f"{list(weights[key].shape)}, but the model expects {list(value.shape)}"
            raise does_not_fit(adapter, name, f"{key} is {shapes}")
    with own_names_kept():
        set_peft_model_state_dict(adapted, weights)


def _require_layers(model: Any, settings: Any, adapter: Adapter, config: TrainingConfig) -> None:
    """Refuse a section whose target layers in the plain ``model`` differ from the adapter's."""
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
            f"{config.finetuning}.target_modules is {_names(section.target_modules)!r}, but the adapter "
            f"{adapter.name} has {_names(own)!r}; they differ in layer {odd[0]}",
            "remove the key, or set new_adapter: true to merge that adapter and train a new one",
        )


def _names(targets: Any) -> Any:
    return targets if isinstance(targets, str) or targets is None else sorted(targets)


def _layers(model: Any, settings: Any, targets: Any) -> set[str]:
    """Return the names of the layers that match ``targets``."""
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
