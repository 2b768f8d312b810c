"""Holds a folder that a hub sent against its own weights, before a model is made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import plain

_SPARE_VALUES = 1 << 24
"""Of buffers, such as tables of positions, which no file holds."""


MOST_VALUE = 1 << 30
"""Of any whole number in a config; the largest that public models have are tens of millions (positions, rope)."""
MOST_EXPERTS = 4096
_LAYERS = re.compile(r"(^|_)(n|num)_(.*_)?(layer|block|stage)s?$|depth", re.ASCII)
_EXPERTS = re.compile(r"(^|_)(n|num)_(.*_)?experts?$", re.ASCII)


def require_own_weights(folder: Path, names: Sequence[str]) -> None:
    """Whether the model that ``config.json`` describes is no larger than the files of weights beside it.

    Loading makes every tensor that the config describes, also those that no file has: a config of a few bytes could
    fill the memory of this machine.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    from safetensors import SafetensorError, safe_open

    num_values = num_tensors = 0
    for name in names:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no dict)
                    num_values += math.prod(file.get_slice(key).get_shape())
                    num_tensors += 1
        except SafetensorError as error:
            raise _invalid(f"{name} is no file of weights: {error}") from error
    _require_bounded(read_object(folder / "config.json"), num_tensors)
    wanted = _values_of(folder)
    if wanted > num_values + _SPARE_VALUES:
        raise _invalid(f"config.json describes {wanted} values, the files of weights have {num_values}")


def _require_bounded(config: object, num_tensors: int) -> None:
    """Refuse numbers of layers and experts that no model with so few tensors has: already a list of them is memory."""
    waiting = [config]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
            continue
        for key, value in one.items() if isinstance(one, dict) else ():
            waiting.append(value)
            most = MOST_VALUE
            if _LAYERS.search(key):
                most = num_tensors
            elif _EXPERTS.search(key):
                most = MOST_EXPERTS
            if isinstance(value, int) and abs(value) > most:
                raise _invalid(f"config.json says {plain(key, 80)}: {value:.6g}; it may be {most} at most")


def _values_of(folder: Path) -> int:
    """Parameters and buffers of the model that a folder's config describes; nothing is allocated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gym_fed.base.models import quiet_loading

    with quiet_loading():
        try:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:
            raise _invalid(f"config.json describes no model: {plain(error, 200)}") from error
    return sum(value.numel() for value in (*model.parameters(), *model.buffers()))


def _invalid(what: str) -> GymError:
    hint = "report it to the coordinator"
    return GymError(ErrorCode.MODEL_INVALID, f"the base that the hub sent: {what[:300]}", hint)
