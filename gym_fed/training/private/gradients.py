"""Clip per-example gradients with Opacus, and add cryptographic lattice noise to their sum.

The loss of an example is the mean over its own labelled tokens. With a mean over the tokens of a batch, the length of
one example would affect the weight of the others. ``require_exact`` verifies that each gradient depends on a single
example.

The sum of the clipped gradients is rounded to multiples of a step, and integer noise from ``gym_fed.privacy.noise`` is
added. The result is always a multiple of the step, so its low bits reveal nothing (Mironov 2012). Rounding moves a sum
of d numbers by at most sqrt(d) / 2 steps, so the distance between neighbouring sums grows by at most sqrt(d) steps. The
noise is increased accordingly, and the noise multiplier stays the same. Opacus' own ``secure_mode`` needs torchcsprng.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.encoding import IGNORED
from gym_fed.privacy.noise import SEED_BYTES, NoiseSource

_ROWS, _LENGTH = 3, 6
_TOLERANCE = 1e-3
_STEPS_PER_STD = 2.0**20
Batch = dict[str, torch.Tensor]


class ClippedGradients:
    """Sums per-example gradients, each clipped to norm ``max_grad_norm`` over all trained weights together.

    Attaches Opacus' hooks to ``model``; ``close`` removes them.
    """

    def __init__(self, model: Any, mode: str, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleHooks
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
            GradSampleHooksFastGradientClipping,
        )

        self.model, self.mode = model, mode
        # Not strict, since that would refuse buffers, even those of position embeddings. ``require_exact`` checks more.
        options: dict[str, Any] = {"loss_reduction": "sum", "strict": False}
        if mode == "ghost":
            options["max_grad_norm"] = max_grad_norm
            self.hooks = GradSampleHooksFastGradientClipping(model, **options)
        else:
            self.hooks = GradSampleHooks(model, force_functorch=mode == "functorch", **options)

    def add(self, batch: Batch, optimizer: Any) -> torch.Tensor:
        """Add a batch to ``summed_grad`` of the trained weights; return its losses, ``[n]`` float32, without a graph.

        Examples whose gradient norm is not finite are skipped.

        Args:
            batch: See ``example_losses``; at least one example.
            optimizer: A ``NoisyOptimizer``, or with ``ghost`` a ``NoisyGhostOptimizer``.
        """
        losses = example_losses(self.model, batch)
        if self.mode == "ghost":
            torch.autograd.backward(losses.sum(), retain_graph=True)
            coefficients = self.hooks.get_clipping_coef().detach()
            finite = torch.isfinite(self.hooks.get_norm_sample())
            _clear_gradients(optimizer.params)
            self.hooks.disable_hooks()
            weighted = coefficients * losses
            if not finite.all():  # even multiplied by 0, the non-finite ones would leave NaN in the sum
                rest = {key: value[finite] for key, value in batch.items()}
                weighted = coefficients[finite] * example_losses(self.model, rest)
            if len(weighted):
                torch.autograd.backward(weighted.sum())
                optimizer.accumulate()
            self.hooks.enable_hooks()
        else:
            torch.autograd.backward(losses.sum())
            optimizer.clip_and_accumulate()
        _clear_gradients(optimizer.params)
        return losses.detach()

    def close(self) -> None:
        """Remove all hooks and attributes from the model."""
        self.hooks.cleanup()
        for module in self.model.modules():
            for name in ("activations", "max_batch_len"):
                if hasattr(module, name):
                    delattr(module, name)
        for weight in self.model.parameters():
            for name in ("summed_grad", "_norm_sample"):
                if hasattr(weight, name):
                    delattr(weight, name)


def example_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Return the next-token loss of each example, a mean over its labelled tokens, ``[n]`` float32.

    Args:
        model: A causal language model, or a PEFT model around one.
        batch: ``input_ids``, ``labels`` and ``attention_mask``, each ``[n, length]`` int64.
    """
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float().transpose(1, 2)
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


class LatticeNoise:
    """Adds Gaussian noise to sums of clipped gradients.

    Args:
        noise_multiplier: Ratio of the noise's standard deviation to the sensitivity.
        max_grad_norm: Maximum L2 norm of one example's contribution.
        num_values: Number of values in a sum, over all tensors.

    Attributes:
        std: Standard deviation, slightly above ``noise_multiplier * max_grad_norm`` to account for the rounding.
    """

    def __init__(self, noise_multiplier: float, max_grad_norm: float, num_values: int) -> None:
        # std = z (C + sqrt(d) std / 2^20), solved for std.
        share = noise_multiplier * math.sqrt(num_values) / _STEPS_PER_STD
        if share >= 0.5:
            weights = counted(num_values, "trained weight", "are")
            reason = f"privacy: {weights} too many for exact noise with multiplier {noise_multiplier:g}"
            remedy = "train fewer weights, for example with finetuning: lora, or lower noise_multiplier"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
        self.std = noise_multiplier * max_grad_norm / (1.0 - share)
        self._step = self.std / _STEPS_PER_STD
        # The seed must be secret, since anyone who knows it can subtract the noise.
        self._source = NoiseSource(os.urandom(SEED_BYTES))

    def add(self, total: torch.Tensor) -> torch.Tensor:
        """Return ``total`` (float32, any shape) rounded to the lattice, with noise, as a new tensor."""
        values = self._source.rounded_gaussian(_STEPS_PER_STD, total.numel(), "gradient")
        noise = torch.from_numpy(values).to(total.device).view_as(total)
        steps = torch.round(total.detach().double() / self._step) + noise
        return (steps * self._step).to(total.dtype)


def noisy_optimizer(
    optimizer: Any, mode: str, *, noise_multiplier: float, max_grad_norm: float, expected_batch_size: int
) -> Any:
    """Wrap ``optimizer`` to clip the gradients (except for ``ghost``) and to add noise before every step."""
    optimizer_class = NoisyGhostOptimizer if mode == "ghost" else NoisyOptimizer
    noisy = optimizer_class(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=expected_batch_size,
    )
    values = sum(weight.numel() for weight in noisy.params)
    noisy.lattice = LatticeNoise(noise_multiplier, max_grad_norm, values)
    return noisy


class NoisyOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus has no types
    """An optimiser that clips, divides by the expected batch size, and adds noise by ``LatticeNoise``."""

    lattice: LatticeNoise

    @property
    def accumulated_iterations(self) -> int:
        """Always 1: physical batches are parts of one logical batch, whose sum is divided by its expected size once."""
        return 1

    def clip_and_accumulate(self) -> None:
        """Add clipped per-example gradients to ``summed_grad``, and skip those whose norm is not finite.

        Opacus multiplies such a gradient by 0, which leaves NaN and would reveal the example to whoever chose the
        weights.
        """
        samples = [self._get_flat_grad_sample(weight) for weight in self.params]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        finite = torch.isfinite(norms)
        coefficients = (self.max_grad_norm / (norms[finite] + 1e-6)).clamp(max=1.0)
        all_finite = bool(finite.all())
        for weight, sample in zip(self.params, samples, strict=True):
            _check_processed_flag(weight.grad_sample)
            finite_sample = sample if all_finite else sample[finite]
            weight.summed_grad += torch.einsum("i,i...", coefficients, finite_sample)
            _mark_as_processed(weight.grad_sample)

    def add_noise(self) -> None:
        """Set ``grad`` of every trained weight to its sum with noise."""
        for weight in self.params:
            _check_processed_flag(weight.summed_grad)
            weight.grad = self.lattice.add(weight.summed_grad).view_as(weight)
            _mark_as_processed(weight.summed_grad)


class NoisyGhostOptimizer(DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """The optimiser for ``ghost``, where gradients are clipped in the backward pass."""

    lattice: LatticeNoise
    add_noise = NoisyOptimizer.add_noise


def require_exact(gradients: ClippedGradients) -> None:
    """Refuse a model whose per-example gradients differ from autograd's gradients of single (synthetic) examples.

    This detects modules that couple examples (batch norm, MoE routers), weights that Opacus does not handle
    (those outside of modules), and weights that it counts twice (tied weights under ``ghost``).

    Raises:
        GymError: ``CONFIG_INVALID`` naming a weight and a remedy.
    """
    model, ghost = gradients.model, gradients.mode == "ghost"
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    batch = _synthetic_batch(model)
    with _without_dropout(model):
        try:
            torch.autograd.backward(example_losses(model, batch).sum())
            if ghost:
                computed = {"": gradients.hooks.get_norm_sample().clone()}
            else:
                computed = {name: _grad_sample(weight) for name, weight in weights.items()}
        except Exception as error:  # Opacus' hooks fail in many ways, all of which exclude the model
            raise _not_exact(gradients.mode, f"{type(error).__name__}: {error}") from error
        finally:
            _clear_gradients(weights.values())
        gradients.hooks.disable_hooks()
        for row in range(_ROWS):
            example = {key: value[row : row + 1] for key, value in batch.items()}
            loss = example_losses(model, example).sum()
            exact = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            expected = dict(zip(weights, exact, strict=True))
            flat = [g.double().norm() for g in expected.values() if g is not None]
            norm = torch.stack(flat).norm() if flat else torch.zeros(())
            if ghost:
                if abs(computed[""][row].double() - norm) > _TOLERANCE * norm + 1e-8:
                    raise _not_exact(gradients.mode, "norms of per-example gradients are not exact")
                continue
            for name, gradient in expected.items():
                gradient = torch.zeros_like(weights[name]) if gradient is None else gradient
                if (computed[name][row] - gradient).double().norm() > _TOLERANCE * norm + 1e-8:
                    raise _not_exact(gradients.mode, f"{name}: per-example gradients are not exact")
        gradients.hooks.enable_hooks()


def _grad_sample(weight: Any) -> torch.Tensor:
    if not isinstance(weight.grad_sample, torch.Tensor) or len(weight.grad_sample) != _ROWS:
        raise ValueError("no per-example gradient")
    return weight.grad_sample.clone()


def _not_exact(mode: str, why: str) -> GymError:
    remedy = "set privacy.grad_sample_mode: hooks" if mode == "ghost" else "use finetuning: lora"
    return GymError(
        ErrorCode.CONFIG_INVALID,
        f"privacy.grad_sample_mode {mode!r}: this model has no per-example gradients: {why}",
        f"{remedy}; models with batch norm, experts, or weights outside of modules cannot be trained privately",
    )


def _synthetic_batch(model: Any) -> Batch:
    """Return synthetic rows of different lengths."""
    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (_ROWS, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    labels = torch.where(mask.bool(), ids, IGNORED)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {key: value.to(device) for key, value in batch.items()}


@contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Disable dropout within a context, but leave modules with trained weights in training mode, for their hooks."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    for module in model.modules():
        if any(w.requires_grad for w in module.parameters(recurse=False)):
            module.training = True
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _clear_gradients(weights: Any) -> None:
    """Clear autograd's gradients, which are sums over unclipped examples and are never used."""
    for weight in weights:
        weight.grad = None
        weight.grad_sample = None
