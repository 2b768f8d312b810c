"""The general path: transformers' own forward pass and cache, for models that packed steps cannot compute.

It serves models with state in addition to keys and values (Qwen3-Next, LFM2, Jamba, Mamba), with other kinds of
attention (Falcon, Bloom, MPT), or without a cache. Requests that decode one token share a forward pass, with their
states joined along the batch dimension. Every other chunk has its own forward pass.

``open_state_pool`` tests what a model supports. The logits of one forward pass over five tokens are the
reference. Steps that keep the state must give the same logits. Requests in decode share a forward pass, and prompts are
computed in chunks, only if this does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gym_fed.serving.forward import trial
from gym_fed.serving.forward.chunk import Chunk, EmbeddedRows, HiddenMean, rows_of_step
from gym_fed.serving.forward.hooked import VariantLayers
from gym_fed.serving.forward.model_arguments import (
    LONGROPE,
    CacheArgument,
    accepted,
    body_of,
    longrope_turn,
    rope_types,
)
from gym_fed.serving.forward.model_states import CarriedState, StateBatch, StateRow, first_states, join
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.state_pool import StateCache, StatePool
from gym_fed.serving.forward.target_modules import ModelLayout
from gym_fed.serving.forward.trial import PackedSteps
from gym_fed.serving.forward.variant_weights import LoadedVariant

RowsOf = Callable[[Sequence[tuple[LoadedVariant | None, int, int]]], StepRows | None]
"""Builds the rows of a forward pass from each chunk's variant, token count and logit count."""


@dataclass(frozen=True)
class _ForwardTokens:
    """The tokens of one forward pass: ``[requests, tokens]``."""

    ids: list[list[int]]
    start: int
    batch: StateBatch | None
    pads: list[int]
    """Padding to the left of each request."""
    pictures: EmbeddedRows | None = None


class GeneralForward:
    """The general path of one model, until ``close``.

    Args:
        model: A transformers causal LM.
        layout: Its layout.
        cached: Whether to use the model's cache; without it, every step recomputes the whole text.

    Attributes:
        batches: True if requests in decode share a forward pass.
        continues: True if several tokens can extend a state in one forward pass; otherwise the whole text is computed.
        forwards: Number of forward passes so far; a step has one or more.
    """

    def __init__(self, model: Any, layout: ModelLayout, *, cached: bool) -> None:
        self.batches = self.continues = False
        self.forwards = 0
        self._model, self._body, self._device = model, body_of(model), torch.device(layout.device)
        self._turn = longrope_turn(model)
        """Length at which the rotary frequencies of a text change, so that it must be recomputed, as in
        ``generate``."""
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._accepted, self._cache = accepted(model), CacheArgument(model, used=cached)
        self._carried = CarriedState(model)
        self._layers = VariantLayers(model, layout)

    @property
    def described(self) -> str:
        """A description of what requests share, for the log."""
        if self._cache.name is None:
            return "without a cache, so every token recomputes the whole text"
        decode = "requests in decode share a forward pass" if self.batches else "a forward pass per request"
        prompts = "prompts in chunks" if self.continues else "prompts in one forward pass each"
        return f"{decode}, {prompts}, no prefix cache"

    def close(self) -> None:
        """Restore the model."""
        self._layers.remove()
        self._carried.put(None)

    def step(self, chunks: Sequence[Chunk], rows_of: RowsOf) -> tuple[Tensor, list[Tensor | None]]:
        """Compute chunks; their caches must have room for them.

        Returns:
            Logits ``[rows, vocabulary]`` float32, and the last hidden states ``[tokens, hidden]`` of every chunk that
            needs them.
        """
        for chunk in chunks:
            _state(chunk).drop_unfinished()
        decode = [at for at, chunk in enumerate(chunks) if self.batches and _decodes(chunk)]
        groups = _similar_lengths([_state(chunk) for chunk in chunks], decode)
        results: dict[int, tuple[Tensor, Tensor | None]] = {}
        try:
            for group in groups:
                if len(group) > 1:
                    together = self._decode([chunks[at] for at in group], rows_of)
                    results.update(zip(group, together, strict=True))
            for at, chunk in enumerate(chunks):
                if at not in results:
                    results[at] = self._single(chunk, rows_of)
        except BaseException:
            for chunk in chunks:
                _state(chunk).row = None  # may be partly written; the next step recomputes it from the tokens
            raise
        for chunk in chunks:
            cache = _state(chunk)
            if chunk.pictures is not None:
                cache.pictures.append((len(cache.ids), chunk.pictures))
            cache.ids += chunk.token_ids
        logits, states = zip(*(results[at] for at in range(len(chunks))), strict=True)
        return torch.cat(logits), list(states)

    def _decode(self, chunks: Sequence[Chunk], rows_of: RowsOf) -> list[tuple[Tensor, Tensor | None]]:
        caches = [_state(chunk) for chunk in chunks]
        lengths = [cache.length for cache in caches]
        batch = join([cache.row for cache in caches if cache.row is not None], lengths)
        pads = [batch.length - length for length in lengths]
        inputs = _ForwardTokens([chunk.token_ids for chunk in chunks], batch.length, batch, pads)
        rows = rows_of([(chunk.variant, 1, 1) for chunk in chunks])
        pooled = any(chunk.needs_states for chunk in chunks)
        logits, states, after = self._run(inputs, rows, None, pooled)
        for at, cache in enumerate(caches):
            cache.row = None if after is None else StateRow(after, at)
        return [
            (logits[at, : chunk.rows], None if states is None else states[at])
            for at, chunk in enumerate(chunks)
        ]

    def _single(self, chunk: Chunk, rows_of: RowsOf) -> tuple[Tensor, Tensor | None]:
        cache, count = _state(chunk), len(chunk.token_ids)
        recompute = cache.row is None or (count > 1 and not self.continues)
        if self._turn is not None:
            recompute = recompute or cache.length <= self._turn < cache.length + count
        if recompute or cache.row is None:
            parts = [*cache.pictures, (len(cache.ids), chunk.pictures)]
            ids = [*cache.ids, *chunk.token_ids]
            inputs = _ForwardTokens([ids], 0, None, [0], rows_of_step(parts))
        else:
            batch = cache.row.alone(cache.length)
            inputs = _ForwardTokens([chunk.token_ids], cache.length, batch, [0], chunk.pictures)
        total = len(inputs.ids[0])
        rows = rows_of([(chunk.variant, total, chunk.rows)])
        kept = range(total - chunk.rows, total)
        logits, states, after = self._run(inputs, rows, kept, chunk.needs_states)
        cache.row = None if after is None else StateRow(after, 0)
        return logits[0], None if states is None else states[0, total - count :]

    def _run(
        self, inputs: _ForwardTokens, rows: StepRows | None, kept: range | None, with_states: bool
    ) -> tuple[Tensor, Tensor | None, StateBatch | None]:
        """Run one forward pass.

        Args:
            inputs: The tokens.
            rows: Their variants.
            kept: The tokens whose logits are computed; None for all.
            with_states: Whether to return the last hidden states.

        Returns:
            Logits ``[requests, kept, vocabulary]``, hidden states ``[requests, tokens, hidden]``, and the state after
            the tokens; None without a cache.
        """
        self.forwards += 1
        arguments = self._arguments(inputs)
        states: list[Tensor] = []
        hooks = []
        if with_states:
            hooks.append(
                self._body.register_forward_hook(
                    lambda _module, _args, output: states.append(output.last_hidden_state)
                )
            )
        if (pictures := inputs.pictures) is not None:
            embedding = self._model.get_input_embeddings()
            hooks.append(
                embedding.register_forward_hook(lambda _module, _args, output: pictures.put(output[0]))
            )
        self._carried.put(None if inputs.batch is None else inputs.batch.carried)
        try:
            with self._layers.computing(rows):
                if kept is not None and not len(kept):
                    output = self._body(**arguments)
                    logits = torch.empty(1, 0, self._vocabulary, device=self._device)
                else:
                    leaves_out = kept is not None and "logits_to_keep" in self._accepted
                    if kept is not None and leaves_out:
                        arguments["logits_to_keep"] = torch.tensor(list(kept), device=self._device)
                    output = self._model(**arguments)
                    logits = output.logits
                    if kept is not None and not leaves_out:
                        logits = logits[:, list(kept)]
                    logits = logits.to(torch.float32)
        finally:
            carried = self._carried.take()
            for hook in hooks:
                hook.remove()
        cache = self._cache.of(output, arguments)
        length = inputs.start + len(inputs.ids[0])
        after = None if cache is None else StateBatch(cache, carried, len(inputs.ids), length)
        return logits, states[0] if states else None, after

    def _arguments(self, inputs: _ForwardTokens) -> dict[str, Any]:
        count, batch = len(inputs.ids[0]), inputs.batch
        arguments: dict[str, Any] = {"input_ids": torch.tensor(inputs.ids, device=self._device)}
        arguments |= self._cache.arguments(None if batch is None else batch.cache)
        if "position_ids" in self._accepted:
            positions = [[inputs.start - pad + at for at in range(count)] for pad in inputs.pads]
            arguments["position_ids"] = torch.tensor(positions, device=self._device)
        if batch is not None and batch.attends and any(inputs.pads):
            seen = torch.ones(len(inputs.pads), inputs.start + count, dtype=torch.int64, device=self._device)
            for row, pad in enumerate(inputs.pads):
                seen[row, :pad] = 0
            arguments["attention_mask"] = seen
        return arguments


_SHORT_TOKENS = 64
"""Length below which padding costs less than another forward pass."""


def _similar_lengths(caches: Sequence[StateCache], decode: Sequence[int]) -> list[list[int]]:
    """Group requests in decode so that padding at most doubles the keys of a forward pass.

    The pool counts keys without padding. States without keys need no padding, so their requests form one group.

    Args:
        caches: The state of every chunk of the step.
        decode: Indices of the chunks in decode, which have a state.
    """
    if not any(row.batch.attends for at in decode if (row := caches[at].row) is not None):
        return [list(decode)]
    groups: list[list[int]] = []
    total = 0
    for at in sorted(decode, key=lambda at: caches[at].length):
        tokens = max(_SHORT_TOKENS, caches[at].length)
        total += tokens
        if groups and (len(groups[-1]) + 1) * tokens <= 2 * total:
            groups[-1].append(at)
        else:
            groups.append([at])
            total = tokens
    return groups


def _state(chunk: Chunk) -> StateCache:
    assert isinstance(chunk.cache, StateCache)
    return chunk.cache


def _decodes(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 and _state(chunk).row is not None and chunk.pictures is None


def open_state_pool(served: PackedSteps, general: GeneralForward, stock: Tensor) -> StatePool:
    """Test the general path, enable the sharing that it supports, and return its state pool.

    Raises:
        GymError: ``MODEL_INVALID`` if logits differ; also any error of the model's code.
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
            # Rounding would hide what some classes lose (Jamba in chunks, MiniMax batched with longer texts).
            general.continues = general.continues and not state.batch.recurrent
            general.batches = general.batches and state.batch.known
    return StatePool(
        token_bytes=growing // len(ids),
        fixed_bytes=fixed,
        dtype=served.pool.dtype,
        device=next(served.model.parameters()).device,
    )


_CLOSE_STATE = 5e-2
"""Tolerance for the relative error of the first layers' states. A lost state gives 0.1 or more, bfloat16 up to 1e-2."""


def _agrees(
    served: PackedSteps,
    steps: Callable[[], tuple[Tensor, list[StateCache]]],
    expected: Tensor,
    texts: Sequence[list[int]],
) -> bool:
    """Return True if logits match the expected ones, and states those of the same texts in one forward pass.

    The logits alone do not suffice, since the tolerance in bfloat16 is wide. NaN never matches.
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
