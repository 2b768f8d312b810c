"""Count the weights of a run on the meta device, from the model's config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_fed.base.modeling.config_checks import largest_size
from gym_fed.base.models import quiet_loading
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import TUNING
from gym_fed.training.model.architecture import fresh_config, read_config
from gym_fed.training.optimizers.base import TrainedWeight

_INNER = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
"""Names of the MLP's width in the configs of transformers."""


@dataclass(frozen=True)
class TextShape:
    """The dimensions of a language model on which activations depend.

    Attributes:
        hidden: Width of the residual stream.
        layers: Number of blocks.
        heads: Number of query heads of a block.
        key_heads: Number of key and value heads.
        head_dim: Width of a head.
        inner: Width of the MLP, or of all experts to which a token is routed.
        vocabulary: Width of the logits.
        normed_heads: True if queries and keys are normalised.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    normed_heads: bool

    @property
    def queries(self) -> int:
        """The total width of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The total width of the keys of a token, and of its values."""
        return self.key_heads * self.head_dim


@dataclass(frozen=True)
class Sizes:
    """The weights of a run.

    Attributes:
        total: Number of weights of the model without an adapter; shared weights are counted once.
        linear: Number of weights in matrices that can be quantised.
        trained: All trained tensors.
        active: Number of weights in the matrices that process one token, including the head, without an adapter.
        adapted: True if an adapter is trained.
        tied: True if the embeddings and the head are one matrix.
        shape: Dimensions of the language model.
    """

    total: int
    linear: int
    trained: tuple[TrainedWeight, ...]
    active: int
    adapted: bool
    tied: bool
    shape: TextShape

    @property
    def num_trained(self) -> int:
        """The number of trained weights."""
        return sum(weight.numel for weight in self.trained)

    @property
    def frozen(self) -> int:
        """The number of frozen weights."""
        return self.total if self.adapted else self.total - self.num_trained


def sizes_of(config: TrainingConfig) -> Sizes:
    """Count the weights that a run would load and train.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` for an unknown model; ``UNAVAILABLE`` if the config must be read from the Hub,
            which is unreachable; ``CONFIG_INVALID`` if the tuning method does not fit the model.
    """
    import torch

    from gym_fed.training.optimizers.base import hidden_matrices
    from gym_fed.training.vision.parts import freeze_parts, frozen_parts

    with torch.device("meta"), quiet_loading():
        model = model_of(fresh_config(config))
        total = sum(value.numel() for value in model.parameters())
        hidden = hidden_matrices(model)
        linear = sum(value.numel() for value in model.parameters() if id(value) in hidden)
        active, shape = _active(model), _shape(model)
        head = model.get_output_embeddings()
        tied = head is not None and head.weight is model.get_input_embeddings().weight
        tuning = TUNING.new(config.finetuning)
        adapted = TUNING.type_of(config.finetuning).is_adapter
        frozen = frozen_parts(model, config)
        tuned = tuning.prepare(model, without_start(config))
        freeze_parts(tuned, config, frozen)
        width = torch.empty(0, dtype=getattr(torch, "float32" if adapted else config.dtype)).element_size()
        trained = tuple(
            TrainedWeight(tuple(value.shape), width, id(value) in hidden)
            for value in tuned.parameters()
            if value.requires_grad
        )
    return Sizes(total, linear, trained, active, adapted, tied, shape)


def count_model(name: str) -> int:
    """Count the weights of a local model."""
    import torch

    with torch.device("meta"), quiet_loading():
        return sum(value.numel() for value in model_of(read_config(name)).parameters())


def model_of(config: Any) -> Any:
    """Build a causal LM, or a model that reads images or sound, with random weights from a ``transformers`` config."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    is_whole = type(config) in AutoModelForMultimodalLM._model_mapping
    auto: Any = AutoModelForMultimodalLM if is_whole else AutoModelForCausalLM
    return auto.from_config(config)


def has_causal_lm(config: Any) -> bool:
    """Return True if ``transformers`` has a causal LM class for this config."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def without_start(config: TrainingConfig) -> TrainingConfig:
    """Return ``config`` with a zero-initialised adapter. Other initialisations read weights, but have the same size."""
    changes: dict[str, Any] = {"quantization": None}
    if config.lora is not None:
        changes["lora"] = config.lora.model_copy(update={"init_lora_weights": "default", "freeze_a": False})
    return config.model_copy(update=changes)


def _shape(model: Any) -> TextShape:
    """Return the dimensions of the language model; one without attention (Mamba) is treated as having one head."""
    text = model.config.get_text_config()
    width, vocabulary = model.get_input_embeddings().weight.shape[::-1]
    hidden = largest_size(text, "hidden_size") or width  # OPT-350m's embeddings are narrower than its blocks
    heads = largest_size(text, "num_attention_heads") or 1
    inner = next((size for key in _INNER if (size := largest_size(text, key))), 4 * hidden)
    if num_experts := largest_size(text, "num_experts_per_tok"):
        inner = num_experts * (largest_size(text, "moe_intermediate_size") or inner)
    return TextShape(
        hidden=hidden,
        layers=largest_size(text, "num_hidden_layers") or 1,
        heads=heads,
        key_heads=largest_size(text, "num_key_value_heads") or heads,
        head_dim=largest_size(text, "head_dim") or hidden // heads,
        inner=inner,
        vocabulary=vocabulary,
        normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )


def _active(model: Any) -> int:
    """Return the number of weights that process one token: all matrices and the head, but only the token's experts."""
    import torch

    text = model.config.get_text_config()
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = next((number for key in keys if (number := largest_size(text, key))), 0)
    share = (largest_size(text, "num_experts_per_tok") or experts) / experts if experts else 1.0
    count = 0.0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            count += module.weight.numel() * (share if ".experts." in name else 1.0)
    for name, value in model.named_parameters():
        if value.dim() == 3 and ".experts." in name:
            count += value.numel() * share
    return round(count)
