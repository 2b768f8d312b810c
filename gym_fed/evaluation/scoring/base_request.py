"""Find the base model of a run, an adapter or a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapters import CONFIG, base_of, read_adapter
from gym_fed.base.models import folder_here
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.own_set import run_config
from gym_fed.evaluation.scoring.opening import ModelRequest
from gym_fed.serving.store.naming import base_of_delta, delta_file, in_parts


def base_request(request: ModelRequest) -> ModelRequest | None:
    """Return the request of a model's base; None if its origin is unknown.

    Args:
        request: A model of this machine, with one variant at most.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` when the base is known and not on this machine; ``USAGE`` for a ``.gymdelta`` that
            names no base of this machine; as ``read_adapter`` and ``read_config``.
    """
    name = str(request.model)
    if (delta := delta_file(name)) is not None:
        return replace(request, model=request.base or base_of_delta(delta), base=None)
    if (parts := in_parts(name)) is not None:
        return replace(request, model=parts[0])
    if request.variants:
        return replace(request, variants=(), store=None)
    if request.adapters:
        return replace(request, adapters=())
    folder = folder_here(name)
    if folder is None:
        return None
    if (folder / CONFIG).is_file():
        adapter = read_adapter(name, folder)
        return _on(request, base_of(adapter), adapter.below)
    config = run_config(folder)
    if config is None or not config.get("model") or config.get("model_init"):
        return None
    return _on(request, str(config["model"]), _listed(config.get("adapter")))


def _on(request: ModelRequest, base: str, adapters: Sequence[Any]) -> ModelRequest:
    for name in (base, *map(str, adapters)):
        if folder_here(name) is None:
            raise GymError(
                ErrorCode.MODEL_NOT_FOUND,
                f"{Path(str(request.model)).name} was made from {name}, which is not on this machine",
                f"fetch it with: gym models pull {name}; or name another model with --compare",
            )
    return replace(request, model=base, adapters=tuple(map(str, adapters)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
