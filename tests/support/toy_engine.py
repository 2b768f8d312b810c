"""A toy for tests of the engine: a recurrent model whose rows do not know of each other, and a source of variants."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.kv_cache import KVCache, KVPool, LayerShape
from gym_fed.serving.forward.variant_weights import LoadedVariant
from tests.support.wait import SECONDS

END = 258
"""gym-nano's end token: the toy is used with its tokenizer."""


class ToyPool(KVPool):
    """A real pool; what a model would keep in its blocks, here the token and the state after it, is in ``held``."""

    def __init__(self, bytes_limit: int | None = None) -> None:
        super().__init__(bytes_limit, shapes={0: LayerShape(1, 1, 1)})
        self.held: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def copy(self, source: int, target: int) -> None:
        super().copy(source, target)
        for slot in range(16):
            if (source, slot) in self.held:
                self.held[target, slot] = self.held[source, slot]

    def at(self, cache: KVCache, place: int) -> tuple[int, torch.Tensor]:
        return self.held[cache.blocks[place // 16], place % 16]


class ToyModel:
    """``state = 0.6 state + embedding``; a variant adds its delta ``shift`` to the logits.

    Attributes:
        steps: Every step's chunks as ``(tokens, wants_logits)``.
        pool: The last one made.
        gate: While it is clear, steps wait.
        pause_after: Number of steps after which the gate closes by itself.
        fail: Called with the chunks before every step; may raise.
        script: If set, the tokens that every answer has, in order.
    """

    vocabulary = 262
    bytes_per_token = ToyPool().block_bytes // 16
    whole_prompts = False

    def __init__(self, context: int = 256) -> None:
        generator = torch.Generator().manual_seed(5)
        self._into = torch.randn(self.vocabulary, 24, generator=generator)
        self._out = torch.randn(24, self.vocabulary, generator=generator)
        self._out[:, 256:] = 0
        config = SimpleNamespace(max_position_embeddings=context, eos_token_id=END)
        self.model = SimpleNamespace(config=config, generation_config=None)
        self.steps: list[list[tuple[int, bool]]] = []
        self.forwards = {"decoder": 0, "transformers": 0, "general": 0}
        self.sign_products: dict[str, int] = {}
        self.packed_products: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.pause_after: int | None = None
        self.entered = threading.Semaphore(0)
        self.fail: Any = None
        self.script: list[int] | None = None

    def new_pool(self, bytes_limit: int | None = None) -> ToyPool:
        self.pool = ToyPool(bytes_limit)
        return self.pool

    def step(self, chunks: Any) -> torch.Tensor:
        if len(self.steps) == self.pause_after:
            self.gate.clear()
        self.entered.release()
        assert self.gate.wait(SECONDS)
        self.steps.append([(len(chunk.token_ids), chunk.wants_logits) for chunk in chunks])
        if self.fail is not None:
            self.fail(chunks)
        rows = []
        for chunk in chunks:
            cache, start = chunk.cache, chunk.cache.length
            assert cache.reserve(len(chunk.token_ids))
            state = self.pool.at(cache, start - 1)[1] if start else torch.zeros(24)
            for place, token_id in enumerate(chunk.token_ids, start):
                state = 0.6 * state + self._into[token_id]
                self.pool.held[cache.blocks[place // 16], place % 16] = token_id, state
            cache.advance(len(chunk.token_ids))
            if chunk.hidden is not None:
                chunk.hidden.add(self._hidden(chunk.token_ids, chunk.variant))
            rows += [self._logits(chunk, place) for place in range(cache.length - chunk.rows, cache.length)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocabulary)

    def _logits(self, chunk: Any, place: int) -> torch.Tensor:
        if self.script is not None:  # prompts of scripted answers end with a 1
            ids = [self.pool.at(chunk.cache, before)[0] for before in range(place + 1)]
            written = len(ids) - ids.index(1) - 1
            return torch.nn.functional.one_hot(torch.tensor(self.script[written]), self.vocabulary) * 50.0
        logits = self.pool.at(chunk.cache, place)[1] @ self._out
        return logits if chunk.variant is None else logits + chunk.variant.weights["shift"]

    def embed(self, token_ids: list[int], variant: LoadedVariant | None) -> torch.Tensor:
        mean = self._hidden(token_ids, variant).mean(dim=0)
        return mean / mean.norm()

    def _hidden(self, token_ids: list[int], variant: LoadedVariant | None) -> torch.Tensor:
        return self._into[token_ids] + (0 if variant is None else 1)

    def release_variants(self) -> None:
        """Nothing is kept from step to step."""


class ToySource:
    """Variants by name: for those in ``cold``, ``poll`` returns None; those in ``broken`` fail.

    Those in ``no_room`` load when no other is in use.
    """

    def __init__(self, *names: str) -> None:
        self.variants = {
            name: LoadedVariant(name, f"{number:064x}", {"shift": _shift(number)}, 100)  # type: ignore[dict-item]
            for number, name in enumerate(names)
        }
        self.cold: set[str] = set()
        self.broken: set[str] = set()
        self.no_room: set[str] = set()
        self.pins: Counter[str] = Counter()

    def prefetch(self, name: str, user: str) -> None:
        if name not in self.variants:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {name!r}")

    def poll(self, name: str, user: str) -> LoadedVariant | None:
        if name in self.broken:
            raise GymError(ErrorCode.HASH_MISMATCH, f"variant {name} is damaged")
        if name in self.cold:
            return None
        if name in self.no_room and any(self.pins[other] for other in self.variants if other != name):
            return None
        self.pins[name] += 1
        return self.variants[name]

    def added_tokens(self, name: str) -> None:
        """Return None: no variant adds tokens."""

    def lacks_room(self, name: str) -> bool:
        return name in self.no_room

    def acquire(self, name: str) -> LoadedVariant:
        raise NotImplementedError("the engine polls")

    def release(self, variant: LoadedVariant) -> None:
        self.pins[variant.name] -= 1
        assert self.pins[variant.name] >= 0


def _shift(number: int) -> torch.Tensor:
    shift = torch.randn(ToyModel.vocabulary, generator=torch.Generator().manual_seed(100 + number)) * 3
    shift[256:] = 0
    return shift
