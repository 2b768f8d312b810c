"""Settings in which tests try every codec of the registry; one that is not named here is tried with groups."""

from __future__ import annotations

from typing import Any

from gym_quant.levels import LevelCodec
from gym_quant.registry import CODECS

GROUPS: list[dict[str, Any]] = [{}, {"group_size": 1 << 20}, {"group_size": 32}, {"group_size": 5}]
"""One scale a tensor, a row, 32 weights, and groups that neither divide a row nor begin at whole bytes."""

_OTHERS: dict[str, list[dict[str, Any]]] = {
    "lora": [
        {"rank": 8},
        {"rank": 3, "scaling": 0.5, "factors": "float32"},
        {"rank": 8, "factors": "int4"},
        {"rank": 3, "factors": "int8*1,binary*2"},
    ],
    "dense": [{}, {"dtype": "float32"}],
    "bitdelta": GROUPS,
}


def settings_of(name: str) -> list[dict[str, Any]]:
    """The codec's usual settings first."""
    if not issubclass(CODECS.type_of(name), LevelCodec):
        return _OTHERS.get(name, [{}])
    lopsided = [{**params, "symmetric": False} for params in GROUPS]
    return [*GROUPS, *lopsided, {"group_size": 32, "scale_dtype": "bfloat16", "symmetric": False}]
