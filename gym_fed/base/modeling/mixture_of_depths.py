"""Mixture-of-Depths (Raposo et al. 2024): in every k-th block a router selects tokens, and the others skip it.

For the states ``x`` ``[batch, length, d]`` of a row, a routed block computes (equation 1), with ``r = w x``:

    x_i + g(r_i) * (block(x~)_i - x_i)   where r_i is among the k largest of the row, k = ceil(capacity * words)
    x_i                                  otherwise; x~ are the selected tokens in their order

The paper's gate g is r itself. Here it is ``2 sigmoid(r)``, which is 1 for a new router, so that a converted model
initially computes its own blocks. Selecting the k largest looks ahead, which is impossible in generation. As in
section 3.5 of the paper, an auxiliary loss (binary cross-entropy of ``sigmoid(r)`` against the selection) trains the
router to predict it, and outside of training a token is selected if ``sigmoid(r) > 0.5``, which is causal.

There is no key-value cache, since skipped tokens have no keys in a block; ``generate`` runs without one, and rejects
``use_cache``. The folder of a converted model has its own ``model_type``, so that a loader without support for the
routers rejects it instead of running every block on every token.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

MODEL_TYPE = "gym_mixture_of_depths"
_INITIAL_STD = 0.02
_NO_CACHE = "a mixture-of-depths model has no key-value cache"


def convert_to_mixture_of_depths(
    model: Any, *, capacity: float, every: int, router_loss_weight: float, seed: int = 0
) -> None:
    """Add routers to a causal LM in place.

    Args:
        model: A ``transformers`` causal LM with decoder layers that take ``position_embeddings``.
        capacity: Fraction of a row's tokens that a routed block computes.
        every: Distance between routed blocks: one in ``every`` blocks is routed.
        router_loss_weight: Weight of the router loss, added once per routed block and batch.
        seed: Seed of the new routers' weights.

    Raises:
        GymError: ``MODEL_INVALID`` if the model already has routers, too few blocks, or unsupported blocks.
    """
    subject = f"mixture_of_depths: {type(model).__name__}"
    if isinstance(model, RoutedModel):
        raise GymError(
            ErrorCode.MODEL_INVALID, f"{subject} already has routers", "remove the key to train it further"
        )
    layers = getattr(model.base_model, "layers", None)
    if layers is None or "position_embeddings" not in inspect.signature(type(layers[0]).forward).parameters:
        message = f"{subject} has no blocks that can be routed"
        raise GymError(ErrorCode.MODEL_INVALID, message, "use a Llama or Qwen3 model")
    if every > len(layers):
        raise GymError(
            ErrorCode.MODEL_INVALID, f"{subject} has {len(layers)} blocks, and every {every}th must be routed"
        )
    generator = torch.Generator().manual_seed(seed)
    for layer in layers[every - 1 :: every]:
        layer.__class__ = _routed_class(type(layer), RoutedBlock)
        weight = next(layer.parameters())
        layer.router = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        torch.nn.init.normal_(layer.router.weight, std=_INITIAL_STD, generator=generator)
        layer.router.to(device=weight.device, dtype=weight.dtype)
        layer.capacity, layer.router_loss_weight = capacity, router_loss_weight
    settings = {"capacity": capacity, "every": every, "router_loss_weight": router_loss_weight}
    model.__class__ = _routed_class(type(model), RoutedModel)
    model.config.mixture_of_depths = settings
    model.config.use_cache = False
    model.generation_config.use_cache = False


def load_mixture_of_depths(folder: Path, dtype: torch.dtype) -> Any:
    """Load a converted model from a folder written by ``save_pretrained``.

    Raises:
        OSError: If a file is missing.
        ValueError: If the weights do not match the config.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    values = read_object(folder / "config.json")
    settings, kind = values.pop("mixture_of_depths"), values.pop("base_model_type")
    config = AutoConfig.for_model(**{**values, "model_type": kind})
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    convert_to_mixture_of_depths(model, **settings)
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(read_object(index)["weight_map"].values())
    weights = {key: value for name in sorted(names) for key, value in load_file(folder / name).items()}
    absent, unknown = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unknown or set(absent) - tied:
        raise ValueError(f"weights do not fit the config: {sorted({*unknown, *absent} - tied)[:3]}")
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
        model.generation_config.use_cache = False
    return model


def is_mixture_of_depths(folder: Path) -> bool:
    """Return True if a model folder contains a converted model."""
    file = folder / "config.json"
    return file.is_file() and read_object(file).get("model_type") == MODEL_TYPE


class RoutedModel:
    """Mixin for the class of a converted model."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate without a key-value cache."""
        if kwargs.pop("use_cache", False):
            raise GymError(ErrorCode.USAGE, _NO_CACHE, "generate with use_cache=False")
        parent: Any = super()
        return parent.generate(*args, use_cache=False, **kwargs)

    def save_pretrained(self, folder: Any, **kwargs: Any) -> None:
        """Save with a model type that other loaders do not mistake for the dense model's."""
        parent: Any = super()
        parent.save_pretrained(folder, **kwargs)
        file = Path(folder) / "config.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        values |= {"base_model_type": values["model_type"], "model_type": MODEL_TYPE}
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class RoutedBlock:
    """Mixin for the class of a routed decoder layer; its weights keep their names."""

    training: bool
    router: torch.nn.Linear
    capacity: float
    router_loss_weight: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map ``[batch, length, d]`` to ``[batch, length, d]`` with the formula in the module's docstring."""
        if past_key_values is not None:
            raise GymError(ErrorCode.USAGE, _NO_CACHE, "set use_cache to False")
        assert position_embeddings is not None
        batch, _, width = hidden_states.shape
        scores = self.router(hidden_states)[..., 0]
        real = _not_padding(attention_mask, scores)
        selected = self._select(scores, real)
        count = int(selected.sum(1).max())
        if count == 0:
            return hidden_states
        # Selected tokens first, both groups in their own order: padding of shorter rows comes last, so that no real
        # token attends to it.
        order = torch.argsort((~selected).to(torch.int8), dim=1, stable=True)[:, :count]
        counts = torch.gather(selected, 1, order)
        at = order.unsqueeze(-1).expand(-1, -1, width)
        inputs = torch.gather(hidden_states, 1, at)
        if attention_mask is not None:
            rows = order[:, None, :, None].expand(-1, attention_mask.shape[1], -1, attention_mask.shape[-1])
            wide = attention_mask.expand(batch, -1, -1, -1)
            columns = order[:, None, None, :].expand(-1, wide.shape[1], count, -1)
            attention_mask = torch.gather(torch.gather(wide, 2, rows), 3, columns)
            # Padding tokens were among the skipped ones, so the mask alone does not hide them.
            hidden = ~counts[:, None, None, :] & ~torch.eye(count, dtype=torch.bool, device=counts.device)
            closed = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask.masked_fill(hidden, closed)
        rotary = tuple(
            torch.gather(p.expand(batch, -1, -1), 1, order.unsqueeze(-1).expand(-1, -1, p.shape[-1]))
            for p in position_embeddings
        )
        if position_ids is not None:
            position_ids = torch.gather(position_ids.expand(batch, -1), 1, order)
        parent: Any = super()
        outputs = parent.forward(
            inputs,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=rotary,
            **kwargs,
        )
        gate = 2 * torch.sigmoid(torch.gather(scores, 1, order)) * counts
        mixed = hidden_states.scatter_add(1, at, (outputs - inputs) * gate.unsqueeze(-1).to(outputs.dtype))
        if self.training and self.router_loss_weight:
            predicted = self.router(hidden_states.detach())[..., 0]  # trains only the router, not its input
            loss = F.binary_cross_entropy_with_logits(predicted[real].float(), selected[real].float())
            mixed = _WithLoss.apply(mixed, self.router_loss_weight * loss)  # type: ignore[no-untyped-call]
        return mixed

    def _select(self, scores: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Select the tokens that the block computes, ``[batch, length]`` bool."""
        if not self.training:
            return (scores > 0) & real
        ranking = scores.masked_fill(~real, -torch.inf).argsort(dim=1, descending=True, stable=True)
        k = torch.ceil(self.capacity * real.sum(1, keepdim=True))
        is_top = torch.arange(scores.shape[1], device=scores.device) < k
        return torch.zeros_like(real).scatter(1, ranking, is_top)


def _not_padding(attention_mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """Return the mask of non-padding tokens, ``[batch, length]`` bool: those that may attend to themselves."""
    if attention_mask is None:
        return torch.ones_like(scores, dtype=torch.bool)
    own = torch.diagonal(attention_mask[:, 0], dim1=1, dim2=2)
    return (own if own.dtype == torch.bool else own == 0).expand(scores.shape)


class _WithLoss(torch.autograd.Function):
    """Pass a tensor through; in backward, give an auxiliary loss a gradient of 1."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.loss_dtype = loss.dtype
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = gradients[0]
        return gradient, torch.ones((), dtype=context.loss_dtype, device=gradient.device)


def _routed_class(base: type, mixin: type) -> type:
    """Create a class with ``mixin`` before the original, under the original's name."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})
