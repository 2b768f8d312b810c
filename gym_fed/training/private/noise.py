"""Opacus' optimisers with noise from a cryptographic source, on a lattice.

Its own ``secure_mode`` needs torchcsprng, which gym-fed does without.

The sum of the clipped gradients is rounded to multiples of a step, and whole-number noise of ``gym_fed.privacy.noise``
is added: what comes out is a multiple of the step whatever the examples were, so its low bits show nothing (Mironov
2012). Rounding moves a sum of d numbers by at most sqrt(d) / 2 steps, and neighbouring sums by at most sqrt(d) steps
from each other: the noise is raised by as much, and the noise multiplier is kept.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.privacy.noise import SEED_BYTES, NoiseSource

_STEPS_PER_STD = 2.0**20


class LatticeNoise:
    """Gaussian noise on sums of clipped gradients.

    Args:
        noise_multiplier: Standard deviation over the sensitivity.
        max_grad_norm: L2 norm of the most that one example adds to the sum.
        num_values: Number of values of a sum, all tensors together.

    Attributes:
        std: Standard deviation: a little above ``noise_multiplier * max_grad_norm``, for the rounding.
    """

    def __init__(self, noise_multiplier: float, max_grad_norm: float, num_values: int) -> None:
        # std = z (C + sqrt(d) std / 2^20), solved for std.
        share = noise_multiplier * math.sqrt(num_values) / _STEPS_PER_STD
        if share >= 0.5:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"privacy: {num_values} trained weights with noise_multiplier {noise_multiplier:g} are too many for a "
                "lattice of 2^20 steps a standard deviation",
                "train fewer weights, as with finetuning: lora, or lower noise_multiplier",
            )
        self.std = noise_multiplier * max_grad_norm / (1.0 - share)
        self._step = self.std / _STEPS_PER_STD
        # Known only to this process: anybody who knew it could subtract the noise.
        self._source = NoiseSource(os.urandom(SEED_BYTES))

    def add(self, total: torch.Tensor) -> torch.Tensor:
        """Return ``total`` (float32, any shape) rounded to the lattice with noise; a new tensor of the same type."""
        drawn = self._source.rounded_gaussian(_STEPS_PER_STD, total.numel(), "gradient")
        noise = torch.from_numpy(drawn).to(total.device).view_as(total)
        whole = torch.round(total.detach().double() / self._step) + noise
        return (whole * self._step).to(total.dtype)


class NoisyOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus has no types
    """Clips, divides by the expected batch size, and adds noise by ``LatticeNoise``."""

    lattice: LatticeNoise

    @property
    def accumulated_iterations(self) -> int:
        """The number 1: physical batches are parts of one logical batch, whose expected size divides the sum once."""
        return 1

    def clip_and_accumulate(self) -> None:
        """Add clipped gradients of single examples to ``summed_grad``; one whose norm is not finite adds nothing.

        Opacus' own multiplies it by 0, which leaves NaN: the author of the weights could see one example that way.
        """
        samples = [self._get_flat_grad_sample(weight) for weight in self.params]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        counted = torch.isfinite(norms)
        shares = (self.max_grad_norm / (norms[counted] + 1e-6)).clamp(max=1.0)
        everyone = bool(counted.all())
        for weight, sample in zip(self.params, samples, strict=True):
            _check_processed_flag(weight.grad_sample)
            weight.summed_grad += torch.einsum("i,i...", shares, sample if everyone else sample[counted])
            _mark_as_processed(weight.grad_sample)

    def add_noise(self) -> None:
        """Put the noised sum into ``grad`` of every trained weight."""
        for weight in self.params:
            _check_processed_flag(weight.summed_grad)
            weight.grad = self.lattice.add(weight.summed_grad).view_as(weight)
            _mark_as_processed(weight.summed_grad)


class NoisyGhostOptimizer(DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """The same for ``ghost``, whose sums are clipped in the backward pass."""

    lattice: LatticeNoise
    add_noise = NoisyOptimizer.add_noise


def noisy_optimizer(
    optimizer: Any, mode: str, *, noise_multiplier: float, max_grad_norm: float, expected_batch_size: int
) -> Any:
    """Wrap ``optimizer`` so that gradients are clipped (except for ``ghost``) and noised before every step."""
    kind = NoisyGhostOptimizer if mode == "ghost" else NoisyOptimizer
    noisy = kind(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=expected_batch_size,
    )
    values = sum(weight.numel() for weight in noisy.params)
    noisy.lattice = LatticeNoise(noise_multiplier, max_grad_norm, values)
    return noisy
