"""Check, before a model is served on the general path, that its state is complete, and what requests may share.

The logits of one forward over five tokens are the reference. Steps that keep the state must give the same; requests in
decode share a forward, and prompts are computed in chunks, only if this changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gym_fed.serving.forward import trial
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.general import GeneralForward
from gym_fed.serving.forward.state_pool import StateCache, StatePool
from gym_fed.serving.forward.trial import PackedSteps


def opened(served: PackedSteps, general: GeneralForward, stock: Tensor) -> StatePool:
    """Try the general path, set what it may share, and return the pool of its requests.

    Args:
        served: The model.
        general: Its general path.
        stock: The result of ``transformers_logits``.

    Raises:
        GymError: ``MODEL_INVALID`` if logits differ; whatever the model's code raises.
    """
    served.pool = StatePool(token_bytes=0, fixed_bytes=0, dtype=served.pool.dtype)
    trial.require_same(served, stock)
    ids, close = trial.tokens(served.vocabulary), trial.tolerance(served)
    general.continues = True
    general.continues = _agrees(lambda: _in_chunks(served, ids), stock[2:], close)
    if trial.LONGROPE not in trial.rope_types(served.model):
        general.batches = True
        general.batches = _agrees(lambda: _together(served, ids), stock[[3, 2, 4, 3]], close)
    token_bytes, fixed_bytes = _sizes(served, ids)
    return StatePool(
        token_bytes=token_bytes,
        fixed_bytes=fixed_bytes,
        dtype=served.pool.dtype,
        device=next(served.model.parameters()).device,
    )


def _agrees(logits: Callable[[], Tensor], expected: Tensor, close: float) -> bool:
    try:
        return trial.distance(logits(), expected) <= close
    except Exception:  # noqa: BLE001 - the model's code does not support it
        return False


def _in_chunks(served: PackedSteps, ids: list[int]) -> Tensor:
    cache = served.new_cache()
    served.step([Chunk(ids[:2], cache)])
    return served.step([Chunk(ids[2:], cache, num_logits=3)])


def _together(served: PackedSteps, ids: list[int]) -> Tensor:
    """Decode two requests of different lengths, two tokens each."""
    caches = [served.new_cache(), served.new_cache()]
    served.step([Chunk(ids[:3], caches[0]), Chunk(ids[:2], caches[1])])
    return torch.cat(
        [served.step([Chunk([ids[3 + at]], caches[0]), Chunk([ids[2 + at]], caches[1])]) for at in range(2)]
    )


def _sizes(served: PackedSteps, ids: list[int]) -> tuple[int, int]:
    """Return the bytes of state that a token adds, and those of any request."""
    cache = served.new_cache()
    served.step([Chunk(ids, cache)])
    assert isinstance(cache, StateCache)
    growing, fixed = (0, 0) if cache.row is None else cache.row.batch.bytes()
    return growing // len(ids), fixed
