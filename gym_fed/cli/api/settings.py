"""The settings of `gym api`: a gym-fed or LLaMA-Factory file, overrides, and the user's own variants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.cli.chat import inference_file
from gym_fed.core.console import err

if TYPE_CHECKING:
    from gym_fed.config.serving import ServingConfig


def serving_config(path: Path | None, overrides: list[str]) -> ServingConfig:
    """Return the file's settings, or the defaults, with overrides.

    Raises:
        GymError: Errors of ``load_config``.
    """
    from gym_fed.config.parsed import ParsedConfig
    from gym_fed.config.serving import ServingConfig
    from gym_fed.config.yaml.file import load_config, place_overrides, validate

    values: dict[str, Any] = {}
    if path is not None:
        parsed = ParsedConfig.read(path)
        if parsed.dialect is None:
            return load_config(parsed, ServingConfig, overrides)
        translated = inference_file.read(parsed)
        values = {"base": translated["model"]}
        values |= {key: translated[key] for key in ("dtype", "chat_template") if key in translated}
        err.print("note: max_new_tokens is not used; requests set max_tokens")
        values["sampling"] = {
            key: value for key, value in translated["sampling"].items() if key != "max_tokens"
        }
    placed = place_overrides(values, overrides)
    return validate(values, ServingConfig, "--set" if path is None else str(path), None, placed | {()})


def with_own_variants(settings: ServingConfig) -> ServingConfig:
    """Default to the store of `gym variant` and the base of its variants.

    ``variants: null`` serves only the base.

    Raises:
        GymError: Errors of ``base_of_store``.
    """
    from gym_fed.serving.store.naming import present_store

    given, defaults = settings.model_fields_set, dict[str, Any]()
    if "variants" not in given:
        defaults["variants"] = present_store()
    store = defaults.get("variants", settings.variants)
    if store is not None and not {"base", "adapter"} & given:
        from gym_fed.serving.store.naming import base_of_store

        defaults["base"] = base_of_store(store) or settings.base
    return settings.model_copy(update=defaults)
