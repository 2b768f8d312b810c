"""Sampling by a seed per answer, as vLLM's ``--use-fp64-gumbel``: for ``generate`` of transformers, and a fake vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList

from gym_fed.training.rollouts.generation import _seed


def sample(logits: torch.Tensor, generators: list[torch.Generator], temperature: float) -> torch.Tensor:
    """The next token of each row of ``[B, vocabulary]``: ``argmax(p / q)`` with q exponential, from the row's seed."""
    scores = (logits.float() / temperature).softmax(dim=-1)
    noise = torch.empty(scores.shape, dtype=torch.float64)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    return (noise.reciprocal() * scores).argmax(dim=-1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class SeededSampling(LogitsProcessor):
    """Leaves one token possible in each row, the one that ``sample`` draws."""

    def __init__(self, seeds: list[int], temperature: float) -> None:
        self._generators, self._temperature = [generator(seed) for seed in seeds], temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = sample(scores, self._generators, self._temperature)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)


def seed_generate(monkeypatch: pytest.MonkeyPatch, run_seed: int, temperature: float = 1.0) -> None:
    """Let ``generate`` draw answers by the seeds that a run gives vLLM."""
    original, calls = GenerationMixin.generate, iter(range(10_000))

    def seeded(self: Any, **arguments: Any) -> Any:
        call, count = next(calls), len(arguments["input_ids"])
        seeds = [_seed(run_seed, "train", call, 0, place) for place in range(count)]
        processors = LogitsProcessorList([SeededSampling(seeds, temperature)])
        return original(self, **arguments, logits_processor=processors)

    monkeypatch.setattr(GenerationMixin, "generate", seeded)
