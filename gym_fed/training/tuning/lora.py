"""LoRA, Hu et al. 2021: two trained factors per linear layer.

Variants are settings: DoRA, rsLoRA, LoRA+, LoRA-FA, and the initialisations PiSSA, OLoRA and LoftQ.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.adapter_saving import save_adapter
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.train.tuning import LoraSettings
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import OPTIMIZERS
from gym_fed.delta.factors import lora_factors
from gym_fed.training.model.peft_models import task_type, wrap
from gym_fed.training.model.quantization import require_quantised
from gym_fed.training.tuning.base import Tuning, refuse_quantization
from gym_fed.training.vision.parts import frozen_parts

if TYPE_CHECKING:
    import torch


__all__ = ["LoraTuning", "add_lora", "frozen_factor", "lora_factors", "save_adapter"]

_START_AT_ZERO = ("default", "gaussian", "orthogonal")


class LoraTuning(Tuning):
    """PEFT's LoRA around a model in memory."""

    tried = "learning, saving, bit-exact resume; all variants and initialisations"
    untried = "starts of EVA and CorDA (not offered)"

    per_example = True
    on_packed = True
    reaches_experts = True
    federates = True
    pipelines = True
    sends_factors = True

    @classmethod
    def starts_as_base(cls, config: TrainingConfig) -> bool:
        return config.lora is None or config.lora.init_lora_weights in _START_AT_ZERO

    @classmethod
    def own_optimizer(cls, config: TrainingConfig) -> str | None:
        if config.lora is None or not config.lora.lora_fa:
            return None
        return "lora.lora_fa: its optimiser projects only the gradients of adapters"

    def check(self, config: TrainingConfig) -> None:
        settings = config.lora
        assert settings is not None  # set by the config
        start = settings.init_lora_weights
        chosen = config.quantization
        if start == "loftq" and (chosen is None or (chosen.method, chosen.bits) != ("bitsandbytes", 4)):
            reason = (
                "lora.init_lora_weights: loftq needs 4-bit quantization by bitsandbytes, which is not set"
            )
            remedy = "add quantization: {bits: 4}, or choose another initialisation"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
        if start.startswith("pissa") or start == "olora":
            refuse_quantization(config, f"lora.init_lora_weights {start} changes the base's weights")
        if settings.bias != "none":
            refuse_quantization(config, "lora.bias trains weights of the base")
        if settings.lora_fa and not OPTIMIZERS.new(config.optimizer).makes_lora_fa:
            reason = f"lora.lora_fa uses its own AdamW, but optimizer is {config.optimizer}"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, "set optimizer to adamw")

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        settings = config.lora
        assert settings is not None  # set by the config
        require_quantised(model, config)
        frozen = frozen_parts(model, config)
        adapted = add_lora(model, settings, seed=config.seed, task=task_type(config), frozen=frozen)
        if settings.init_lora_weights == "loftq":
            from gym_fed.training.model.lora_starts import start_from_loss

            start_from_loss(adapted, config)
        return adapted

    def finish(self, model: Any, config: TrainingConfig) -> None:
        from gym_fed.training.model.lora_starts import to_plain_lora

        to_plain_lora(model)

    def save(self, model: Any, config: TrainingConfig, folder: Path, base_name: str | None) -> None:
        """Write the adapter in a form that applies to the original base."""
        from gym_fed.training.model.lora_starts import start_subtracted

        with start_subtracted(model):
            save_adapter(model, folder, base_name)


def add_lora(
    model: Any,
    settings: LoraSettings,
    *,
    seed: int,
    task: str = "CAUSAL_LM",
    frozen: frozenset[str] = frozenset(),
) -> Any:
    """Wrap ``model`` in a PEFT model with LoRA, which freezes and shares its weights.

    Args:
        model: A ``transformers`` model.
        settings: Rank, scale, targets and variant. (``loftq`` is first initialised like ``default``, and completed by
            ``LoraTuning.prepare``.)
        seed: Seed of the random A factors (B starts at zero). With ``settings.freeze_a``, the A factors depend only on
            the seed and the layer's name, are the same on every machine, and are not trained.
        task: PEFT's name for the model's task.
        frozen: Parts without adapters, in a model that reads images; see ``vision.parts.frozen_parts``.

    Raises:
        GymError: ``CONFIG_INVALID`` if ``target_modules`` matches no layer of the model, or matches a layer whose
            factors ``freeze_a`` cannot send.
    """
    from peft import LoraConfig

    from gym_fed.training.model.lora_starts import keeping_originals

    start = settings.init_lora_weights
    tied = getattr(model.config, "tie_word_embeddings", False)
    initialisation: Any = True if start in ("default", "loftq") else start
    config = LoraConfig(
        task_type=task,
        r=settings.r,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # PEFT writes fractions itself, for rsLoRA
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
        exclude_modules=settings.exclude_modules or None,
        target_parameters=settings.target_parameters or None,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
        bias=settings.bias,
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
        modules_to_save=settings.modules_to_save or None,
        init_lora_weights=initialisation,
        # This keeps the output head tied to the embeddings.
        ensure_weight_tying=bool(tied and {"embed_tokens", "lm_head"} & set(settings.modules_to_save)),
    )

    def wrapped() -> Any:
        return wrap(
            model, config, "lora", seed=seed, frozen=frozen,
            fused_experts=settings.fused_experts, needs_layers=settings.needs_layers(),
        )  # fmt: skip

    changes_base = start.startswith("pissa") or start == "olora"
    adapted = keeping_originals(model, wrapped) if changes_base else wrapped()
    if settings.freeze_a:
        _freeze_a(adapted, seed)
    if settings.lora_fa:
        for name, value in adapted.named_parameters():
            if "lora_A" in name:
                value.requires_grad_(False)
    return adapted


def frozen_factor(seed: int, name: str, rank: int, width: int) -> torch.Tensor:
    """Return a layer's shared A ``[rank, width]`` float32: uniform within ``1 / sqrt(width)``, like PEFT's.

    Its bits are SHAKE-256 of seed and name, so that contributors agree regardless of their library's random generator.
    Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning" (FFA-LoRA).
    """
    import numpy as np
    import torch

    stream = hashlib.shake_256(f"frozen A\n{seed}\n{name}".encode()).digest(4 * rank * width)
    fractions = (np.frombuffer(stream, "<u4") >> 8).astype(np.float32) * np.float32(2.0**-23)
    values = (fractions - np.float32(1.0)) * np.float32(1.0 / math.sqrt(width))
    return torch.from_numpy(values).reshape(rank, width)


def _freeze_a(model: Any, seed: int) -> None:
    import torch
    from peft.tuners.lora import LoraLayer

    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            module: Any = layer
            _require_sendable(name, module)
            for factor in module.lora_A.values():
                with torch.no_grad():
                    factor.weight.copy_(frozen_factor(seed, name, *factor.weight.shape))
                factor.weight.requires_grad_(False)


def _require_sendable(name: str, layer: Any) -> None:
    """Refuse a layer whose update cannot be sent as B and the frozen A (see ``delta.factors``)."""
    ((_, rank),) = layer.r.items()
    width = min(layer.in_features, layer.out_features)
    has_matrix = layer.lora_A and next(iter(layer.lora_A.values())).weight.dim() == 2
    is_linear = has_matrix and not getattr(layer, "fan_in_fan_out", False)
    kind = type(layer.get_base_layer()).__name__
    exclude = f"remove {name.rpartition('.')[2]} from lora.target_modules"
    refuse_first(
        (
            not is_linear,
            f"{name} is a {kind}, not a linear layer",
            f"{exclude}, or set lora.freeze_a to false",
        ),
        (
            rank > width,
            f"{name} has {width} inputs or outputs, fewer than its rank {rank}",
            f"set lora.r to at most {width}, or {exclude}",
        ),
        prefix="lora.freeze_a: ",
    )
