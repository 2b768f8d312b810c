"""The ``vllm_generation`` of TRL's trainers, over a ``RolloutClient``: which policy answers which prompts, and when.

With ``max_staleness`` N, the answers of generation ``g`` are requested when the policy begins to learn from generation
``g - N``, and the policy of that moment writes them. So policy, prompts and seeds of an answer depend on the config
alone, whatever the speed of vLLM. A checkpoint contains the answers that were requested ahead, so that a resumed run
ends with the same weights.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.rollouts.client import RolloutClient, SampledAnswer
from gym_fed.training.rollouts.policy import RolloutPolicy, adapter_file

_FILE = "rollouts-ahead.safetensors"
_SEEDS = 2**62


@dataclass(frozen=True)
class _Ahead:
    """Answers that were requested ahead.

    Attributes:
        version: That of the policy that writes them.
        prompts: Token ids, one list per answer.
        answers: The answers.
    """

    version: int
    prompts: list[list[int]]
    answers: Future[list[SampledAnswer]]


class VllmGeneration:
    """Generates the answers of a trainer; TRL calls ``sync_weights`` and ``generate``.

    Args:
        trainer: The trainer, whose model is a PEFT model.
        client: The vLLM.
        prompts_of: Function that returns the token ids of all prompts of a generation, by its number.
        max_staleness: Number of generations that are requested ahead.
        seed: The run's seed.

    Attributes:
        version: The number of optimiser steps before the policy that wrote the last answers.
        logprobs: Log-probabilities of the last answers' tokens when they were sampled.
    """

    def __init__(
        self,
        trainer: Any,
        client: RolloutClient,
        prompts_of: Callable[[int], list[list[int]]],
        max_staleness: int,
        seed: int,
    ) -> None:
        self.version = 0
        self.logprobs: list[list[float]] = []
        self._trainer, self._client, self._prompts_of = trainer, client, prompts_of
        self._max_staleness, self._seed = max_staleness, seed
        self._ahead: dict[int, _Ahead] = {}
        self._policy: RolloutPolicy | None = None
        self._run, self._states = secrets.token_hex(6), 0
        self._place: tuple[str, int] | None = None
        self._calls = 0

    def sync_weights(self) -> None:
        """Take the trained adapter as the policy of the answers that are requested from now on."""
        trainer = self._trainer
        self._states += 1
        version = int(trainer.state.global_step)
        content = adapter_file(trainer.accelerator.unwrap_model(trainer.model))
        is_first = self._policy is None
        self._policy = RolloutPolicy(f"policy-{self._run}-{self._states}-v{version}", version, content)
        if is_first:
            self._client.require_sampling_logprobs(self._policy, self._prompts_of(0)[0])

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Return prompts, answers, and a list of one log-probability for each token.

        Raises:
            GymError: ``UNAVAILABLE`` if vLLM does not come back.
        """
        del images, num_generations, profiler
        trainer, policy = self._trainer, self._policy
        assert policy is not None
        step = int(trainer._step)
        generation = step // self._batches_per_generation()
        is_training = bool(trainer.model.training)
        place = ("train", generation) if is_training else ("eval", int(trainer.state.global_step))
        self._calls = self._calls + 1 if place == self._place else 0
        self._place = place
        ahead = self._ahead.pop(generation, None) if is_training and not self._calls else None
        if ahead is None:
            ahead = self._request(policy, place, prompts)
        elif ahead.prompts != prompts:
            raise GymError(
                ErrorCode.INTERNAL,
                f"generation {generation} has different prompts than those requested ahead",
            )
        answers = ahead.answers.result()
        if is_training and not self._calls:
            self._request_ahead(policy, generation)
        self.version, self.logprobs = ahead.version, [answer.logprobs for answer in answers]
        ids = [answer.token_ids for answer in answers]
        return prompts, ids, [[[value] for value in values] for values in self.logprobs], None

    def save(self, folder: Path) -> None:
        """Write the answers that were requested ahead, after waiting for them."""
        tensors: dict[str, torch.Tensor] = {}
        for generation, ahead in self._ahead.items():
            answers = ahead.answers.result()
            flat = {
                "prompts": torch.tensor([token for ids in ahead.prompts for token in ids]),
                "prompt_lengths": torch.tensor([len(ids) for ids in ahead.prompts]),
                "tokens": torch.tensor([token for answer in answers for token in answer.token_ids]),
                "lengths": torch.tensor([len(answer.token_ids) for answer in answers]),
                "logprobs": torch.tensor(
                    [value for answer in answers for value in answer.logprobs], dtype=torch.float64
                ),
                "version": torch.tensor(ahead.version),
            }
            tensors |= {f"{generation}.{name}": value for name, value in flat.items()}
        save_file(tensors, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Forget the current policy, and read the answers that a checkpoint's run had requested ahead."""
        self._place, self._calls = None, 0
        for ahead in self._ahead.values():
            ahead.answers.cancel()
        self._ahead = {}
        with safe_open(folder / _FILE, framework="pt") as file:
            names = list(file.keys())
            for generation in sorted({int(name.partition(".")[0]) for name in names}):
                parts = {
                    name.partition(".")[2]: file.get_tensor(name)
                    for name in names
                    if name.startswith(f"{generation}.")
                }
                lengths = parts["lengths"].tolist()
                answers: Future[list[SampledAnswer]] = Future()
                answers.set_result(
                    [
                        SampledAnswer(tokens.tolist(), logprobs.tolist())
                        for tokens, logprobs in zip(
                            parts["tokens"].split(lengths), parts["logprobs"].split(lengths), strict=True
                        )
                    ]
                )
                prompts = [ids.tolist() for ids in parts["prompts"].split(parts["prompt_lengths"].tolist())]
                self._ahead[generation] = _Ahead(int(parts["version"]), prompts, answers)

    def _batches_per_generation(self) -> int:
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    def _request_ahead(self, policy: RolloutPolicy, generation: int) -> None:
        batches = self._trainer.state.max_steps * self._trainer.args.gradient_accumulation_steps
        end = -(-batches // self._batches_per_generation())
        for later in range(generation + 1, min(generation + 1 + self._max_staleness, end)):
            if later not in self._ahead:
                self._ahead[later] = self._request(policy, ("train", later), self._prompts_of(later))

    def _request(self, policy: RolloutPolicy, place: tuple[str, int], prompts: list[list[int]]) -> _Ahead:
        calls = self._calls if place == self._place else 0
        seeds = [_seed(self._seed, *place, calls, number) for number in range(len(prompts))]
        return _Ahead(policy.version, prompts, self._client.submit(policy, prompts, seeds))


def _seed(*parts: object) -> int:
    """Return an answer's seed from the run's, the kind of batch, its number, the turn and the answer's place."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") % _SEEDS
