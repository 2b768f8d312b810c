"""Rounds for scoring: eight sign deltas of stories260K, or of gym-nano if there is no shared folder.

The first of two rounds is honest, and its soup is applied; the updates of the second are scored. Contributors are
Shakespeare speakers (for gym-nano: text tasks) with different amounts of text, who train different numbers of steps.
Held-out rows are from speakers that nobody trains on (for gym-nano: unseen questions of the same tasks).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _sequences import Delta, Sequences, encoded, opened, speeches, trained

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.data import encode_rows, generate
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.evaluation.soup_game import SoupGame, round_coefficients

CONTRIBUTORS = 8
LENGTH, BATCH = 64, 8
CODEC = CodecPolicy(
    codec="bitdelta",
    group_size="auto",
    small_tensors="bitdelta",
    scale_dtype="bfloat16",
    error_feedback=False,
)
TASKS = ("double", "vowels", "dash", "shout", "last", "initial", "caesar", "twice")
COMPOSITIONS: dict[str, tuple[str, ...]] = {
    "honest": ("honest",) * 8,
    "mixed": ("honest",) * 5 + ("zero", "noise", "sign_flip"),
    "shadows": ("honest",) * 5 + ("stale", "copied", "duplicate"),
    "overshooting": ("honest",) * 8,
}
"""The eight contributors of each composition. Honest ones differ in amounts of text and steps. ``copied`` is the first
honest update with other scales, ``duplicate`` is trained on the second's text with another seed, and ``stale`` is the
third's update of the previous round. ``overshooting`` has a step twice as long as the updates' mean.
"""
OVERSHOT = 2.0
AMOUNTS = (1.0, 0.5, 0.25, 0.1, 0.75, 1.0, 0.05, 0.5)
STEPS = (12, 8, 12, 12, 4, 2, 12, 6)


class World:
    """A model, the text of eight contributors, and held-out text."""

    def __init__(self, shared: Path | None, heldout: int) -> None:
        if shared is not None:
            self.loaded = load_model(str(shared / "models" / "stories260K"))
            speakers = speeches(shared, 40)
            self.texts = [self._encoded(rows) for rows in speakers[:32]]
            held = self._rows([row for rows in speakers[32:] for row in rows])
        else:
            self.loaded = load_model("gym-nano")
            self.texts = [self._encoded(generate(task, 200, seed=1)) for task in TASKS]
            held = self._rows([r for t in TASKS for r in generate(t, 40, seed=0, split="heldout")])
        self.held = held[:: max(1, len(held) // heldout)][:heldout]

    def _encoded(self, rows: list[dict[str, Any]]) -> Sequences:
        return encoded(self.loaded.tokenizer, rows, LENGTH)

    def _rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        packing = "text" in rows[0]
        return list(encode_rows(self.loaded.tokenizer, rows, max_length=LENGTH, packing=packing))


@dataclass
class Season:
    """The state after the first round, and all updates that contributors may send in the second."""

    world: World
    seed: int
    model: Any
    earlier: list[Delta]
    honest: list[Delta]
    retrained: Delta
    """Update trained on the second contributor's text with another seed."""

    @classmethod
    def of(cls, world: World, seed: int, learning_rate: float) -> Season:
        """Train all contributors twice, applying the soup of the first round in between."""
        generator = torch.Generator().manual_seed(1000 + seed)
        chosen = torch.randperm(len(world.texts), generator=generator)[:CONTRIBUTORS].tolist()
        parts = [AMOUNTS[(seed + k) % CONTRIBUTORS] for k in range(CONTRIBUTORS)]
        texts = [
            world.texts[who][: max(2, int(len(world.texts[who]) * part))]
            for who, part in zip(chosen, parts, strict=True)
        ]
        steps = [STEPS[(seed + k) % CONTRIBUTORS] for k in range(CONTRIBUTORS)]
        model = copy.deepcopy(world.loaded.model)

        def update(k: int, turn: int) -> Delta:
            return trained(model, texts[k], steps[k], learning_rate, BATCH, 100 * seed + 10 * turn + k)

        earlier = [update(k, 0) for k in range(CONTRIBUTORS)]
        with torch.no_grad():
            for name, tensor in model_tensors(model).items():
                tensor.add_(torch.stack([delta[name] for delta in earlier]).mean(0))
        return cls(world, seed, model, earlier, [update(k, 1) for k in range(CONTRIBUTORS)], update(1, 2))

    @contextmanager
    def round(self, composition: str) -> Iterator[SoupGame]:
        """Yield the game of the second round with the contributors of a composition."""
        generator = torch.Generator().manual_seed(self.seed)
        sent = [self._sent(kind, k, generator) for k, kind in enumerate(COMPOSITIONS[composition])]
        spec = BaseSpec.of(self.model, f"round 2 of seed {self.seed}")
        with opened(sent, CODEC, spec) as files:
            rate = OVERSHOT if composition == "overshooting" else 1.0
            counts = round_coefficients(files, [1.0] * len(files), server_learning_rate=rate)
            world = self.world
            yield SoupGame(self.model, world.loaded.tokenizer, files, world.held, counts, max_length=LENGTH)

    def _sent(self, kind: str, k: int, generator: torch.Generator) -> Delta:
        own = self.honest[k]
        if kind == "zero":
            return {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        if kind == "noise":
            return {
                name: torch.randn(t.shape, generator=generator) * t.square().mean().sqrt()
                for name, t in own.items()
            }
        if kind == "sign_flip":
            return {name: -tensor for name, tensor in own.items()}
        if kind == "copied":
            return {name: 0.9 * tensor for name, tensor in self.honest[0].items()}
        if kind == "stale":
            return self.earlier[2]
        return self.retrained if kind == "duplicate" else own
