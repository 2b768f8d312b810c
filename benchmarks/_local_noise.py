"""A federation on images whose contributors train with DP-SGD locally, as with ``recipe.privacy``.

Per-example gradients are clipped and every step is noised, as in Opacus (Abadi et al. 2016). Batches are Poisson
samples. Malicious clients do not know the noise in others' updates, and add none themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from _digits import Digits, Schedule
from torch import Tensor

from gym_fed.privacy.accountant import NoiseEvent, epsilon, noise_multiplier_for


@dataclass(frozen=True)
class DPSGD:
    """Settings of a contributor's training.

    Attributes:
        noise_multiplier: Standard deviation of a step's noise divided by ``max_grad_norm``; 0 disables privacy.
        sampling_probability: Per-example sampling probability of a step.
        max_grad_norm: Norm to which per-example gradients are clipped.
    """

    noise_multiplier: float
    sampling_probability: float = 1.0
    max_grad_norm: float = 1.0

    @classmethod
    def within(cls, bound: float, target_delta: float, steps: int, sampling_probability: float) -> DPSGD:
        """Return the settings with the least noise that keeps ``steps`` steps within epsilon ``bound``."""
        multiplier = noise_multiplier_for(
            bound, target_delta, sampling_probability=sampling_probability, count=steps
        )
        event = NoiseEvent(
            noise_multiplier=multiplier, sampling_probability=sampling_probability, count=steps
        )
        spent = epsilon([event], target_delta)
        assert 0.9 * bound < spent <= bound, (spent, bound)
        return cls(multiplier, sampling_probability)


class PrivateDigits(Digits):
    """A federation whose honest contributors train with DP-SGD."""

    def __init__(
        self, seeds: Sequence[int], contributors: int, malicious: int, data: str, private: DPSGD, noisy: int
    ) -> None:
        """Create the federation; the first ``noisy`` contributors add noise."""
        super().__init__(seeds, contributors, malicious, "iid", data)
        self.private, self.noisy = private, noisy

    def train(
        self,
        model: Tensor,
        schedule: Schedule,
        who: range,
        generator: torch.Generator,
        poison: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        if who.start >= self.contributors:
            # the coordinator's own rows are public
            return super().train(model, schedule, who, generator, poison)
        private, network, seeds, number = self.private, self.network, len(self.seeds), len(who)
        start = model[:, None].expand(seeds, number, network.dimension).reshape(-1, network.dimension)
        weights, velocity = start.clone(), torch.zeros_like(start)
        counts = self._counts[:, who.start : who.stop, None]
        index = self._index[:, who.start : who.stop]
        rows = torch.arange(seeds)[:, None, None]
        images = self.images[rows, index].view(seeds * number, -1, network.inputs)
        labels = self.labels[rows, index].view(seeds * number, -1)
        if poison is not None:
            images, labels = poison(images, labels)
        held = torch.arange(index.shape[2]) < counts
        expected = private.sampling_probability * counts.reshape(-1, 1)
        deviation = private.noise_multiplier * private.max_grad_norm / expected
        deviation = deviation * (torch.arange(who.start, who.stop) < self.noisy).repeat(seeds)[:, None]
        for _ in range(schedule.steps):
            drawn = torch.rand(held.shape, generator=generator) < private.sampling_probability
            taken = (drawn & held).view(seeds * number, -1) / expected
            gradient = network.gradient(
                weights, images, labels, partial(_clipped, taken, private.max_grad_norm)
            )
            if private.noise_multiplier:
                gradient += deviation * torch.randn(gradient.shape, generator=generator)
            velocity.mul_(schedule.momentum).add_(gradient)
            weights.sub_(velocity, alpha=schedule.lr or self.set.lr)
        return (weights - start).view(seeds, number, network.dimension)


def _clipped(taken: Tensor, most: float, norms: Tensor) -> Tensor:
    return taken * (most / norms.clamp_min(1e-12)).clamp_max(1.0)
