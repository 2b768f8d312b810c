"""The sides of `serving.py` in one process: our engine with and without variants, PEFT's mixed adapters, swapping."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gym_fed.serving.engine import Engine
from gym_fed.serving.request import GenerationRequest, SamplingParams


@dataclass(frozen=True)
class Load:
    """What every side is asked for: ``users`` at once, each a prompt of its own and an answer of ``new`` tokens."""

    users: int
    prompt: int
    new: int
    vocabulary: int

    def prompts(self) -> list[list[int]]:
        """Random tokens, the same for every side, above a tokenizer's special ones."""
        generator = torch.Generator().manual_seed(self.users)
        high = min(self.vocabulary, 256)
        return torch.randint(10, high - 10, (self.users, self.prompt), generator=generator).tolist()


@dataclass
class Speeds:
    """Of one side at one number of users, a turn after the other."""

    tokens_a_second: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)

    def add(self, tokens: int, seconds: float, first: Sequence[float]) -> None:
        self.tokens_a_second.append(tokens / seconds)
        self.first_token_seconds.extend(first)

    @property
    def rate(self) -> float:
        """Median tokens a second of all users together, prompts read in that time too."""
        return statistics.median(self.tokens_a_second)

    @property
    def first(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(self.first_token_seconds)

    @property
    def first_p95(self) -> float:
        ordered = sorted(self.first_token_seconds)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def run_engine(engine: Engine, load: Load, variants: Sequence[str | None], speeds: Speeds) -> None:
    """All users at once, user ``i`` with ``variants[i]``."""
    sampling = SamplingParams(max_tokens=load.new, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    running = [
        engine.submit(GenerationRequest(prompt, sampling, variant, user=f"u{number}"))
        for number, (prompt, variant) in enumerate(zip(load.prompts(), variants, strict=True))
    ]
    done = [one.result() for one in running]
    seconds = time.perf_counter() - started
    speeds.add(sum(d.completion_tokens for d in done), seconds, [d.seconds_to_first_token for d in done])


def run_peft(model: Any, load: Load, names: Sequence[str], speeds: Speeds) -> None:
    """PEFT's mixed batch: one ``generate`` whose row ``i`` has adapter ``names[i]``."""
    from transformers import LogitsProcessorList

    started = time.perf_counter()
    seen: list[float] = []

    def first(ids: Tensor, scores: Tensor) -> Tensor:
        if not seen:
            seen.append(time.perf_counter() - started)
        return scores

    ids = torch.tensor(load.prompts())
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=list(names),
            max_new_tokens=load.new,
            min_new_tokens=load.new,
            do_sample=False,
            logits_processor=LogitsProcessorList([first]),
        )
    tokens = (made.shape[1] - ids.shape[1]) * len(ids)
    speeds.add(tokens, time.perf_counter() - started, seen * load.users)


class Swapper:
    """One model for one user after the other: a merged model's weights are copied over the last one's.

    Two merged models are kept in memory and taken in turns, so that a swap is a copy at memory speed; from a disk it
    would only be slower.
    """

    def __init__(self, engine: Engine, model: Any, deltas: Sequence[Any]) -> None:
        from gym_fed.delta import apply_delta, model_tensors

        self._engine = engine
        self._live = model_tensors(model)
        self._base = {name: tensor.clone() for name, tensor in self._live.items()}
        self._merged = []
        for delta in deltas:
            copy = {name: tensor.clone() for name, tensor in self._base.items()}
            apply_delta(copy, delta)
            self._merged.append(copy)

    def run(self, load: Load, speeds: Speeds) -> None:
        sampling = SamplingParams(max_tokens=load.new, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        first, tokens = [], 0
        for number, prompt in enumerate(load.prompts()):
            self._put(self._merged[number % len(self._merged)])
            waited = time.perf_counter() - started
            done = self._engine.submit(GenerationRequest(prompt, sampling)).result()
            first.append(waited + done.seconds_to_first_token)
            tokens += done.completion_tokens
        speeds.add(tokens, time.perf_counter() - started, first)
        self._put(self._base)

    def _put(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(weights[name])
