"""Extend rotary embeddings beyond a model's training length, with frequencies computed by transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted

BASE_CHANGES = "base_changes.json"
"""File in an adapter's folder with changes of its base that are not saved with the base."""
_RAISES_LENGTH = ("linear", "yarn", "llama3", "longrope")


def scale_rope(model: Any, settings: dict[str, Any]) -> None:
    """Change the rotary frequencies of a causal LM in place; its config stores them for saved folders.

    Args:
        model: A ``transformers`` causal LM with one rotary embedding (such as Llama, Qwen, Mistral).
        settings: ``type``, ``factor`` and further parameters of the type; see
            ``gym_fed.config.train.compute.RopeScalingConfig``.

    Raises:
        GymError: ``MODEL_INVALID`` if the model has no rotary embedding that can be scaled, or rejects the values.
    """
    config = model.config
    rotary = getattr(model.base_model, "rotary_emb", None)
    before = getattr(config, "rope_parameters", None)
    if rotary is None or not isinstance(before, dict) or "rope_theta" not in before:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"rope_scaling: {type(model).__name__} has no rotary embeddings that can be scaled",
            "remove rope_scaling from the config",
        )
    if before.get("rope_type", "default") != "default":
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"rope_scaling: the model is already scaled ({before['rope_type']}, factor {before.get('factor')})",
            "remove rope_scaling, or start from the unscaled model",
        )
    kind, factor = settings["type"], float(settings["factor"])
    given = {key: value for key, value in settings.items() if key != "type" and value is not None}
    original = int(given.get("original_max_position_embeddings", config.max_position_embeddings))
    parameters = {**before, **given, "rope_type": kind, "factor": factor}
    if kind in _RAISES_LENGTH:
        if kind != "linear":
            parameters["original_max_position_embeddings"] = original
        length = round(original * factor)
    else:  # dynamic: scaling begins at the config's length
        parameters.pop("original_max_position_embeddings", None)
        length = original
    frequencies = rotary.inv_freq.shape[0]
    for name in ("short_factor", "long_factor"):  # transformers would only warn about a wrong length
        if len(given.get(name, [0] * frequencies)) != frequencies:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"rope_scaling.{name}: has {counted(len(given[name]), 'divisor')}, but the model has "
                f"{counted(frequencies, 'frequency')}",
                "specify one per frequency",
            )
    set_rope(model, parameters, length)


def set_rope(model: Any, parameters: dict[str, Any], length: int) -> None:
    """Set ``rope_parameters`` and ``max_position_embeddings``, and rebuild the rotary embedding."""
    config = model.config
    config.rope_parameters = parameters
    config.max_position_embeddings = length
    rotary = model.base_model.rotary_emb
    try:
        config.validate_rope()
        fresh = type(rotary)(config)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise GymError(
            ErrorCode.MODEL_INVALID, f"rope_scaling: {type(model).__name__} rejects it: {error}"
        ) from error
    model.base_model.rotary_emb = fresh.to(rotary.inv_freq.device)


@contextmanager
def rope_undone_on_error(model: Any | None) -> Iterator[None]:
    """Restore the rotary embedding of ``model`` if the block fails, so that another attempt can scale it."""
    rotary = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if model is None or rotary is None:
        yield
        return
    names = ("rope_parameters", "max_position_embeddings")
    before = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(model.config, name, value)
        model.base_model.rotary_emb = rotary.to(next(model.parameters()).device)
        raise


def write_base_changes(model: Any, folder: Path) -> None:
    """Write the rotary settings of an adapter's base, which are not in the adapter's config."""
    values = {
        "rope_parameters": model.config.rope_parameters,
        "max_position_embeddings": model.config.max_position_embeddings,
    }
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / BASE_CHANGES).write_text(text, encoding="utf-8")


def apply_base_changes(model: Any, folder: Path) -> None:
    """Apply the rotary settings that the adapter in ``folder`` was trained with to a base, if there are any.

    Raises:
        GymError: ``MODEL_INVALID`` if the settings cannot be read.
    """
    file = folder / BASE_CHANGES
    if not file.is_file():
        return
    try:
        values = read_object(file)
        parameters, length = dict(values["rope_parameters"]), int(values["max_position_embeddings"])
    except (ValueError, KeyError, TypeError) as error:
        raise GymError(
            ErrorCode.MODEL_INVALID, f"{file} cannot be read: {error}", "restore the adapter's files"
        ) from error
    set_rope(model, parameters, length)
