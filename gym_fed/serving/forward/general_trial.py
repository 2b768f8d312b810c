"""Check, before a model is served on the general path, that its state is complete, and what requests may share.

The logits of one forward pass over five tokens are the reference. Steps that keep the state must give the same logits.
Requests in decode share a forward pass, and prompts are computed in chunks, only if this does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gym_fed.serving.forward import trial
from gym_fed.serving.forward.chunk import Chunk, HiddenMean
from gym_fed.serving.forward.general import GeneralForward
from gym_fed.serving.forward.model_arguments import LONGROPE, rope_types
from gym_fed.serving.forward.model_states import first_states
from gym_fed.serving.forward.state_pool import StateCache, StatePool
from gym_fed.serving.forward.trial import PackedSteps


def open_state_pool(served: PackedSteps, general: GeneralForward, stock: Tensor) -> StatePool:
    """Test the general path, set what requests may share, and return the pool of its requests.

    Args:
        served: The model.
        general: Its general path.
        stock: The result of ``transformers_logits``.

    Raises:
        GymError: ``MODEL_INVALID`` if logits differ; whatever the model's code raises.
    """
    served.pool = StatePool(token_bytes=0, fixed_bytes=0, dtype=served.pool.dtype)
    trial.require_same(served, stock)
    ids = trial.tokens(served.vocabulary)
    general.continues = True
    general.continues = _agrees(served, lambda: _in_chunks(served, ids), stock[2:], [ids])
    if LONGROPE not in rope_types(served.model):
        general.batches = True
        texts = [ids, ids[:4]]
        general.batches = _agrees(served, lambda: _together(served, ids), stock[[3, 2, 4, 3]], texts)
    cache = _new(served)
    served.step([Chunk(ids, cache, wants_logits=False, hidden=HiddenMean())])
    state = cache.branch().row  # raises for a cache that cannot be copied
    growing, fixed = 0, 0
    if state is not None:
        growing, fixed = state.batch.bytes()
        if served.pool.dtype != "float32":
            # Rounding hides what some classes lose (Jamba in chunks, MiniMax batched with longer texts).
            general.continues = general.continues and not state.batch.recurrent
            general.batches = general.batches and state.batch.known
    return StatePool(
        token_bytes=growing // len(ids),
        fixed_bytes=fixed,
        dtype=served.pool.dtype,
        device=next(served.model.parameters()).device,
    )


_CLOSE_STATE = 5e-2
"""Tolerance of a state's relative norm in the first layers. A lost state gives 0.1 or more, bfloat16 up to 1e-2."""


def _agrees(
    served: PackedSteps,
    steps: Callable[[], tuple[Tensor, list[StateCache]]],
    expected: Tensor,
    texts: Sequence[list[int]],
) -> bool:
    """Compare logits with the expected ones, and states with those of texts computed in one forward pass each.

    The logits alone do not suffice, since the tolerance in bfloat16 is wide. NaN never agrees.
    """
    try:
        logits, caches = steps()
        if not trial.distance(logits, expected) <= trial.tolerance(served):
            return False
        return all(_states_agree(served, cache, ids) for cache, ids in zip(caches, texts, strict=True))
    except Exception:  # noqa: BLE001 - the model's code does not support it
        return False


def _states_agree(served: PackedSteps, cache: StateCache, ids: list[int]) -> bool:
    whole = _new(served)
    served.step([Chunk(ids, whole)])
    if cache.row is None or whole.row is None:
        return True
    pairs = zip(first_states(cache.row, len(ids)), first_states(whole.row, len(ids)), strict=True)
    return all(trial.distance(own.float(), expected.float()) <= _CLOSE_STATE for own, expected in pairs)


def _in_chunks(served: PackedSteps, ids: list[int]) -> tuple[Tensor, list[StateCache]]:
    cache = _new(served)
    served.step([Chunk(ids[:2], cache)])
    return served.step([Chunk(ids[2:], cache, num_logits=3)]), [cache]


def _together(served: PackedSteps, ids: list[int]) -> tuple[Tensor, list[StateCache]]:
    """Decode two requests of different lengths, two tokens each."""
    caches = [_new(served), _new(served)]
    served.step([Chunk(ids[:3], caches[0]), Chunk(ids[:2], caches[1])])
    logits = [
        served.step([Chunk([ids[3 + at]], caches[0]), Chunk([ids[2 + at]], caches[1])]) for at in range(2)
    ]
    return torch.cat(logits), caches


def _new(served: PackedSteps) -> StateCache:
    cache = served.new_cache()
    assert isinstance(cache, StateCache)
    return cache
