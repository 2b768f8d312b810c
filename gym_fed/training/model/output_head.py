"""Compute log-probabilities of tokens without storing logits (TRL's fused head), where that is exact.

TRL's ``add_fused_lm_head`` repeats the computation after a model's last layer: it multiplies by the head's weights, and
scales and caps the logits by known keys of the config. For an architecture that differs, it would fail or compute a
wrong loss (MPT's ``logit_scale`` scales attention; RecurrentGemma's cap is called ``logits_soft_cap``; Granite-MoE
counts its experts in ``num_local_experts``). The fused head is therefore used only for the architectures in ``FUSED``.
For all others, ``add_output_head`` uses the logits from the model's own forward pass.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.data.row_counts import IGNORED
from gym_fed.training.model.architecture import known_architecture

if TYPE_CHECKING:
    from torch import Tensor

FUSED = frozenset(
    {
        *("apertus", "arcee", "bamba", "bloom", "cohere", "cohere2", "deepseek_v2", "ernie4_5"),
        *("ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text"),
        *("glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "helium"),
        *("hunyuan_v1_dense", "internlm3", "jamba", "lfm2", "llama", "mamba", "mamba2", "ministral"),
        *("mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi"),
        *(
            "phi3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "seed_oss",
            "smollm3",
            "stablelm",
        ),
        *("starcoder2", "xglm"),
        *("gemma3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"),  # read images; contain a language model
    }
)
"""Model types whose fused head gives the same loss and gradients as the model's own forward pass.

``tests/unit/training/test_output_head.py`` compares each of them, with all weights and with LoRA.
"""


def is_fused(model_config: Any) -> bool:
    """Return True if TRL's fused head is exact for a model with this ``transformers`` config."""
    return str(model_config.model_type) in FUSED


def reads_whole_logits(config: TrainingConfig) -> bool:
    """Return True if the model of a run is known to compute the logits of a whole batch in its forward pass."""
    architecture = known_architecture(config)
    return architecture is not None and not is_fused(architecture)


def add_output_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Make ``model(..., labels=labels, fused_lm_head=True)`` return TRL's ``FusedCausalLMOutput``.

    Replaces TRL's ``add_fused_lm_head``, with the same arguments.
    """
    from trl.trainer.utils import add_fused_lm_head

    if is_fused(model.config):
        add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)
        return
    own_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **named: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return own_forward(*args, **named, **{key: v for key, v in given.items() if v is not None})
        own_outputs = own_forward(*args, **{**named, "use_cache": False})
        logits = own_outputs.logits
        if shift_labels is None:
            assert labels is not None  # TRL passes one of the two
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        router = _router_loss(own_outputs, self.config.get_text_config(), named)
        return _fused_output(logits, shift_labels, temperature, outputs, num_items_in_batch, router)

    model.forward = types.MethodType(forward, model)


@contextmanager
def patched_output_heads(trainer: type) -> Iterator[None]:
    """Make TRL trainers that are created in this context use ``add_output_head``."""
    name = "add_fused_lm_head"
    modules = {sys.modules[base.__module__] for base in trainer.__mro__ if base.__module__.startswith("trl.")}
    before = {module: getattr(module, name) for module in modules if hasattr(module, name)}
    try:
        for module in before:
            setattr(module, name, add_output_head)
        yield
    finally:
        for module, value in before.items():
            setattr(module, name, value)


def _router_loss(outputs: Any, text_config: Any, named: dict[str, Any]) -> tuple[Tensor, float] | None:
    """Return the load-balancing loss of a mixture of experts and its weight; None if it was not requested."""
    if not named.get("output_router_logits", getattr(text_config, "output_router_logits", False)):
        return None
    loss = getattr(outputs, "aux_loss", None)
    loss = outputs.logits.new_zeros(()) if loss is None else loss
    return loss, float(getattr(text_config, "router_aux_loss_coef", 0.0))


def _fused_output(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    outputs: tuple[str, ...],
    num_items: Any,
    router: tuple[Tensor, float] | None,
) -> Any:
    """Return TRL's output for ``[n, t, v]`` logits and the ``[n, t]`` labels of the same positions."""
    import torch
    from trl.trainer.utils import FusedCausalLMOutput

    labels = labels.to(logits.device)
    mask = labels != IGNORED
    picked = logits[mask].float() / temperature
    log_probs = picked.log_softmax(-1)
    values = {"log_probs": log_probs.gather(-1, labels[mask][:, None])[:, 0]}
    if "entropy" in outputs:
        values["entropy"] = torch.special.entr(log_probs.exp()).sum(-1)
    if "log_sum_sq_probs" in outputs:
        values["log_sum_sq_probs"] = (2 * log_probs.detach()).logsumexp(-1)
    if "mean_logits" in outputs:
        values["mean_logits"] = picked.detach().mean(-1)
    if "is_top1" in outputs:
        values["is_top1"] = picked.argmax(-1) == labels[mask]
    # Use a scatter, so that a batch without labels also has an autograd graph.
    scattered = {
        name: value.new_zeros(mask.shape).masked_scatter(mask, value) for name, value in values.items()
    }
    loss = -scattered["log_probs"].sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
    router_loss = None
    if router is not None:
        router_loss, weight = router
        loss = loss + weight * router_loss
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=router_loss, **scattered)
