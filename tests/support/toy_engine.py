"""A toy for tests of the engine: a recurrent model whose rows do not know of each other, and a source of variants."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward.loaded import LoadedVariant

END = 258
"""gym-nano's end token: the toy is used with its tokenizer."""


@dataclass
class ToyCache:
    state: torch.Tensor
    ids: list[int] = field(default_factory=list)


class ToyModel:
    """``state = 0.6 state + embedding``; a variant adds its operand ``shift`` to the logits.

    Attributes:
        steps: Every step's pieces as ``(tokens, wants_logits)``.
        gate: While it is clear, steps wait.
        fail: Called with the pieces before every step; may raise.
        script: If set, the tokens that every answer has, in order.
    """

    vocabulary = 262
    bytes_per_token = 10

    def __init__(self, context: int = 256) -> None:
        generator = torch.Generator().manual_seed(5)
        self._into = torch.randn(self.vocabulary, 24, generator=generator)
        self._out = torch.randn(24, self.vocabulary, generator=generator)
        self._out[:, 256:] = 0
        config = SimpleNamespace(max_position_embeddings=context, eos_token_id=END)
        self.model = SimpleNamespace(config=config, generation_config=None)
        self.steps: list[list[tuple[int, bool]]] = []
        self.sign_products: dict[str, int] = {}
        self.packed_products: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.fail: Any = None
        self.script: list[int] | None = None

    def new_cache(self, _capacity: int) -> ToyCache:
        return ToyCache(torch.zeros(24))

    def step(self, pieces: Any) -> torch.Tensor:
        self.entered.release()
        assert self.gate.wait(20)
        self.steps.append([(len(piece.token_ids), piece.wants_logits) for piece in pieces])
        if self.fail is not None:
            self.fail(pieces)
        rows = []
        for piece in pieces:
            for token_id in piece.token_ids:
                piece.cache.state = 0.6 * piece.cache.state + self._into[token_id]
            piece.cache.ids += piece.token_ids
            if piece.hidden is not None:
                piece.hidden.add(self._hidden(piece.token_ids, piece.variant))
            if piece.wants_logits:
                rows.append(self._logits(piece))
        return torch.stack(rows) if rows else torch.empty(0, self.vocabulary)

    def _logits(self, piece: Any) -> torch.Tensor:
        if self.script is not None:
            written = (
                len(piece.cache.ids) - piece.cache.ids.index(1) - 1
            )  # prompts of scripted answers end with a 1
            return torch.nn.functional.one_hot(torch.tensor(self.script[written]), self.vocabulary) * 50.0
        logits = piece.cache.state @ self._out
        return logits if piece.variant is None else logits + piece.variant.operands["shift"]

    def embed(self, token_ids: list[int], variant: LoadedVariant | None) -> torch.Tensor:
        mean = self._hidden(token_ids, variant).mean(dim=0)
        return mean / mean.norm()

    def _hidden(self, token_ids: list[int], variant: LoadedVariant | None) -> torch.Tensor:
        return self._into[token_ids] + (0 if variant is None else 1)

    def rest(self) -> None:
        """Nothing is kept from step to step."""


class ToySource:
    """Variants by name: of those in ``cold``, ``poll`` reports that they are loading; those in ``broken`` fail.

    Those in ``no_room`` come when no other is in use.
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

    def prefetch(self, name: str) -> None:
        if name not in self.variants:
            raise GymError(ErrorCode.NOT_FOUND, f"no variant {name!r}")

    def poll(self, name: str) -> LoadedVariant | None:
        if name in self.broken:
            raise GymError(ErrorCode.HASH_MISMATCH, f"variant {name} is damaged")
        if name in self.cold:
            return None
        if name in self.no_room and any(self.pins[other] for other in self.variants if other != name):
            return None
        self.pins[name] += 1
        return self.variants[name]

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
