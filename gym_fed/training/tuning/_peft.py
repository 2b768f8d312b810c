"""The common part of adapters: PEFT's wrapper around a model, with errors that name our keys, and saving."""

from __future__ import annotations

import copy
import re
import warnings
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.patterns import names_of, require_quick_patterns
from gym_fed.base.modeling.routers import router_names
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.vision.parts import frozen_parts, narrow_targets

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig

_NAMING = (
    ("modules_to_save", False),
    ("exclude_modules", False),
    ("rank_pattern", True),
    ("alpha_pattern", True),
)
"""Settings that name modules, and whether by regular expressions."""
_CONVERTED_ROUTER = "gate.weight"
"""PEFT's name for the router of Mixtral, Qwen3-MoE and similar models."""


def wrap(
    model: Any, peft_config: Any, section: str, *, seed: int, frozen: frozenset[str] = frozenset()
) -> Any:
    """Wrap ``model`` in a ``peft.PeftModel``; its own weights are frozen and shared with the wrapper.

    Args:
        model: A ``transformers`` model.
        peft_config: A ``peft.PeftConfig``; it stays as it is.
        section: The section of the YAML that it was made of, for errors.
        seed: Decides the random factors.
        frozen: Parts of a model that reads images which get no adapter; see ``vision_parts.frozen_parts``.

    Raises:
        GymError: ``CONFIG_INVALID`` when the settings fit no layer of the model, or PEFT would change them to fit.
    """
    from peft import get_peft_model
    from transformers import set_seed

    from gym_fed.training.model.quantization import settle

    peft_config = copy.deepcopy(peft_config)  # PEFT adds to lists in it, which may be those of our own config
    own_patterns = any(getattr(peft_config, key, None) for key in ("rank_pattern", "alpha_pattern"))
    own_patterns = own_patterns and not getattr(peft_config, "target_parameters", None)
    require_quick_patterns(peft_config.to_dict(), names_of(model), section)
    _leave_out_routers(model, peft_config)
    _require_modules(model, peft_config, section)
    narrow_targets(model, peft_config, frozen, section)
    _leave_out_converted_routers(model, peft_config)
    settle(model)
    set_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="You have passed exclude_modules")
            # Without patterns of the config the warning is about PEFT's own, which it writes for routed experts.
            unmatched = "The following .*_pattern keys did not match"
            warnings.filterwarnings("error" if own_patterns else "ignore", message=unmatched)
            warnings.simplefilter("ignore", FutureWarning)  # PEFT calls transformers by an old name
            warnings.filterwarnings("error", message="Invalid `.*_block_size`")  # PEFT would take another one
            return get_peft_model(model, peft_config)
    except (ValueError, UserWarning, RuntimeWarning, re.error) as error:
        first = str(error).strip().splitlines()[0]
        if isinstance(error, re.error):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{section}.target_modules: {error.pattern!r} is no regular expression: {first}",
                "correct it, or list the names",
            ) from error
        if "did not match" in first or "exclude_modules" in first:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{section}: {first}",
                "name modules that target_modules names, too, or remove the key",
            ) from error
        if "arget modules" in first or "target_modules" in first:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{section}.target_modules: {_shown(peft_config.target_modules)} fits no layer of "
                f"{type(model).__name__}",
                "use all-linear, or names such as q_proj and v_proj",
            ) from error
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{section}: does not fit {type(model).__name__}: {first}",
            f"change the sizes in {section}, or its target_modules",
        ) from error


def _leave_out_routers(model: Any, peft_config: Any) -> None:
    """Exclude routers from ``all-linear``; a router that is named in ``target_modules`` gets its adapter."""
    excluded = getattr(peft_config, "exclude_modules", None) or []
    if peft_config.target_modules == "all-linear" and not isinstance(excluded, str):
        names = sorted({*excluded, *router_names(model)})
        if names:
            peft_config.exclude_modules = names


def _leave_out_converted_routers(model: Any, peft_config: Any) -> None:
    """Take the router's weight out of what PEFT makes of ``all-linear`` for experts that transformers 5 fuses.

    ``exclude_modules`` does not apply to it. What is converted here stays as it is when PEFT converts it again. Where
    ``narrow_targets`` has listed layers by name, PEFT adds no router.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    if peft_config.target_modules == "all-linear":
        convert_peft_config_for_transformers(peft_config, model, None)
        if getattr(peft_config, "target_parameters", None):
            peft_config.target_parameters = {*peft_config.target_parameters} - {_CONVERTED_ROUTER}


def _require_modules(model: Any, peft_config: Any, section: str) -> None:
    """Refuse names that no module of the model has; PEFT would omit them, or refuse them after wrapping."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [
        name for name, _ in model.named_parameters()
    ]  # routed experts are one parameter, no modules
    for key, is_pattern in _NAMING:
        names = [*modules, *parameters] if is_pattern else modules
        for module_name in getattr(peft_config, key, None) or ():
            pattern = module_name if is_pattern else re.escape(module_name)
            try:
                is_present = any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
            except re.error as error:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"{section}.{key}: {module_name!r} is no regular expression: {error}",
                    "correct it, or give a module's name",
                ) from error
            reason = f"{section}.{key}: {type(model).__name__} has no module {module_name!r}"
            remedy = "give names such as q_proj, embed_tokens or norm, or remove it"
            refuse_first((not is_present, reason, remedy))


def require_head_without_adapter(model: Any, config: TrainingConfig) -> None:
    """Refuse an adapter on the output head, which TRL's losses multiply by without it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = model.get_output_embeddings() if hasattr(model, "peft_config") else None
    if not isinstance(head, BaseTunerLayer):
        return
    if config.adapter and not config.new_adapter:
        key, hint = f"adapter: {config.adapter[-1]}", "set new_adapter: true to merge it and train another"
    else:
        key, hint = (
            f"{config.finetuning}.target_modules",
            "put it into modules_to_save, which trains it whole",
        )
    raise GymError(
        ErrorCode.CONFIG_INVALID,
        f"{key}: is on the output head, whose adapter the loss of {config.algorithm} does not see",
        hint,
    )


def wrap_for(model: Any, peft_config: Any, config: TrainingConfig) -> Any:
    """Call ``wrap`` with the section of the chosen method, on a quantised base if the config has one."""
    from gym_fed.training.model.quantization import require_quantised

    require_quantised(model, config)
    frozen = frozen_parts(model, config)
    return wrap(model, peft_config, config.finetuning, seed=config.seed, frozen=frozen)


def task_type(config: TrainingConfig) -> str:
    """Return PEFT's name for the task of the algorithm's model."""
    task: str = ALGORITHMS.type_of(config.algorithm).task_type
    return task


def peft_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return keyword arguments of a ``peft.PeftConfig`` from the section of the chosen method."""
    section = config.chosen_sections()[config.finetuning].model_dump()
    return {**section, "modules_to_save": section["modules_to_save"] or None, "task_type": task_type(config)}


def _shown(targets: Any) -> str:
    return repr(sorted(targets) if isinstance(targets, set) else targets)
