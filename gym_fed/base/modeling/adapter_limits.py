"""Limit what the ``adapter_config.json`` of an adapter makes PEFT allocate and load.

PEFT creates what a config specifies, of any size, and compares it with the weights only afterwards. Some of its methods
load other adapters or models that the config names, from any path or from the Hub.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

MAX_RANK = 1 << 14
"""Maximum rank of a non-LoRA adapter, whose rank need not be a dimension in its file."""
_RANKS = ("r", "init_r", "target_r")
_LOAD_OTHERS = {"XLORA": "adapters", "SHADOW": "shadow_model"}
"""PEFT types that load other adapters or models, with the key that names these."""
_INITIAL_STATE = "prompt_tuning_init_state_dict_path"
_FREE_LAYERS = 256
"""Number of layers that ``layer_replication`` may always create, in addition to one for each tensor of the adapter."""
_BASES = 8
_FREE_WEIGHTS = 1 << 26
"""PEFT may create tensors of as many weights, and of ``_BASES`` times those of the base. BOFT creates the most."""
_HINT = "restore its files, or use another adapter"


def require_limits(name: str, config: Mapping[str, Any], weights: Path) -> None:
    """Reject an adapter that loads other files, or has sizes that its weights do not have.

    Raises:
        GymError: ``MODEL_INVALID`` with the key.
    """
    from safetensors import SafetensorError, safe_open

    kind = str(config.get("peft_type", "LORA"))
    for key in (_LOAD_OTHERS.get(kind), _INITIAL_STATE):
        if key is not None and config.get(key) not in (None, "mirror"):  # "mirror": of its own base
            raise _invalid(
                name, f"{key} of {kind} loads other files, which is not supported", "use another adapter"
            )
    try:
        with safe_open(weights, framework="pt") as file:
            names = list(file.keys())
            factors = [key for key in names if ".lora_A." in key or ".lora_embedding_A" in key]
            shapes = [file.get_slice(key).get_shape() for key in factors]
    except SafetensorError:
        return  # loading reports it
    _require_ranks(name, config, kind, max((shape[0] for shape in shapes if shape), default=0))
    max_layers = len(names) + _FREE_LAYERS
    if (layers := _replicated(config.get("layer_replication"))) > max_layers:
        raise _invalid(
            name, f"layer_replication makes {counted(layers, 'layer')}, but at most {max_layers} fit"
        )


def _require_ranks(name: str, config: Mapping[str, Any], kind: str, max_stored: int) -> None:
    """Reject ranks larger than those of the weights."""
    if kind == "LOKR":
        return  # a rank larger than a layer's size is full rank
    max_rank = max_stored if kind == "LORA" else MAX_RANK
    pattern = config.get("rank_pattern")
    values = [*map(config.get, _RANKS), *(pattern.values() if isinstance(pattern, dict) else ())]
    ranks = [rank for rank in values if isinstance(rank, int)]
    if max(ranks, default=0) > max_rank:
        raise _invalid(name, f"says rank {max(ranks):.6g}, but its weights have at most {max_rank}")


def _replicated(spans: object) -> int:
    """Return the number of layers of ``layer_replication``, a list of pairs; other values are left to PEFT."""
    pairs = (
        [span for span in spans if isinstance(span, list) and len(span) == 2]
        if isinstance(spans, list)
        else []
    )
    return sum(max(0, to - start) for start, to in pairs if isinstance(start, int) and isinstance(to, int))


@contextmanager
def bounded_tensors(model: Any, name: str) -> Iterator[None]:
    """Bound the tensors that are created inside the context by the size of ``model``.

    Raises:
        GymError: ``MODEL_INVALID`` before a tensor is created that is too large together with those before it.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    left = _FREE_WEIGHTS + _BASES * sum(parameter.numel() for parameter in model.parameters())

    class Bound(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            nonlocal left
            left -= _created(func, args)
            if left < 0:
                raise _invalid(name, "creates tensors that are larger than those of its base")
            return func(*args, **(kwargs or {}))

    with Bound():  # type: ignore[no-untyped-call]
        yield


def _created(func: Any, args: tuple[Any, ...]) -> int:
    """Return the number of elements that a factory function of torch allocates; 0 for functions of other tensors."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    if "self" in named and not func._schema.name.startswith("aten::new_"):
        return 0
    size = next((named[key] for key in ("size", "end", "n") if key in named), 0)
    return math.prod(size) if isinstance(size, list | tuple) else int(size)


def _invalid(name: str, problem: str, hint: str = _HINT) -> GymError:
    return GymError(ErrorCode.MODEL_INVALID, f"{name}: adapter_config.json: {problem}", hint)
