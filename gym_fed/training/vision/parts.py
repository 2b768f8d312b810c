"""Freeze parts of a model that reads images or sound: tower, projector or language model (see ``base.media_parts``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gym_fed.base.media_parts import LANGUAGE_MODEL, PART_NAMES, PROJECTOR, TOWER, part_of
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig


_LABELS = {TOWER: "vision tower", PROJECTOR: "projector", LANGUAGE_MODEL: "language model"}


def reads_images(model: Any) -> bool:
    """Return True if the model has a part for images or sound."""
    parts = {name for name, value in vars(model.config).items() if value is not None}
    # Granite Speech's sound part is named encoder, like a part of some text models (Blt).
    return bool(parts & {"vision_config", "audio_config"}) or {"encoder_config", "projector_config"} <= parts


def frozen_parts(model: Any, config: TrainingConfig) -> frozenset[str]:
    """Return the config keys of the frozen parts; empty for a model that reads only text.

    Raises:
        GymError: ``CONFIG_INVALID`` for a part that the model does not have, or if nothing would be trained.
    """
    frozen = frozenset(key for key in PART_NAMES if getattr(config, key))
    if not reads_images(model):
        reason = f"freeze_language_model: {type(model).__name__} reads only text, so nothing would be trained"
        refuse_first((config.freeze_language_model, reason, "remove it"))
        return frozenset()
    present = {part_of(name) for name, _ in model.named_parameters()}
    optional = {PROJECTOR} - config.model_fields_set  # some models have no projector
    for key in sorted(frozen - present - optional):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{key}: no {_LABELS[key]} was found in {type(model).__name__}: looked for modules called "
            f"{', '.join((*PART_NAMES[key], *(['visual.merger'] if 'projector' in key else [])))}",
            f"set {key}: false, and list the layers to train in the section of finetuning",
        )
    reason = f"{', '.join(sorted(frozen))}: all of {type(model).__name__} would stay frozen"
    refuse_first((present <= frozen, reason, "set one of them to false"))
    return frozen


def narrow_targets(model: Any, peft_config: Any, frozen: frozenset[str], section: str) -> None:
    """Remove the layers of frozen parts from an adapter's ``target_modules``, in place.

    Raises:
        GymError: ``CONFIG_INVALID`` if no layer is left, or for ``modules_to_save`` in a frozen part.
    """
    if not frozen:
        return
    for name in getattr(peft_config, "modules_to_save", None) or ():
        _refuse_named(model, name, frozen, f"{section}.modules_to_save")
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists

    _maybe_include_all_linear_layers(peft_config, model)
    names = [name for name, _ in model.named_modules() if check_target_module_exists(peft_config, name)]
    trained = [name for name in names if part_of(name) not in frozen]
    if names and not trained:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{section}.target_modules matches {counted(len(names), 'layer')}, all in frozen parts "
            f"({', '.join(sorted(frozen))})",
            "choose other layers, or set one of these keys to false",
        )
    if names:
        peft_config.target_modules = set(trained)


def freeze_parts(model: Any, config: TrainingConfig, frozen: frozenset[str]) -> None:
    """Freeze the weights of frozen parts in a prepared model.

    Raises:
        GymError: ``CONFIG_INVALID`` for ``freeze.extra_modules`` in a frozen part.
    """
    if config.freeze is not None:
        for name in config.freeze.extra_modules:
            _refuse_named(model, name, frozen, "freeze.extra_modules")
    for name, weight in model.named_parameters():
        if part_of(name) in frozen:
            weight.requires_grad_(False)


def outside_tower(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the ``named_modules`` outside the parts that read images or sound."""
    for name, module in model.named_modules():
        if part_of(name) not in (TOWER, PROJECTOR):
            yield name, module


def _refuse_named(model: Any, suffix: str, frozen: frozenset[str], key: str) -> None:
    """Refuse a module name, possibly without its first components, that refers to a frozen part."""
    components = suffix.split(".")
    for name, _ in model.named_modules():
        if name.split(".")[-len(components) :] == components and (part := part_of(name)) in frozen:
            reason = f"{key}: {suffix!r} matches {name}, which {part} freezes"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, f"set {part}: false, or remove the name")
