"""Checks, without running a model, whether packed steps can compute it, and resolves the ``auto`` formats."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from gym_quant.kernels import dispatch
from gym_quant.linear import linear_formats
from torch import nn

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.plain_model import PlainModel

MARK = "_gym_fed_multi_variant"
"""The attribute that marks a model as being served."""
DECODER_CLASSES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
)
_DECODER_BODIES = tuple(name.replace("ForCausalLM", "Model") for name in DECODER_CLASSES)
"""The body classes of models that read pictures."""
_WINDOWED = ("full_attention", "sliding_attention")


def require_servable(model: nn.Module, kernel: str) -> None:
    """Refuse a model that packed steps cannot compute, as far as is known without running it."""
    name = type(model).__name__

    def refuse(why: str, hint: str) -> GymError:
        return GymError(ErrorCode.MODEL_INVALID, f"{name} cannot be served: {why}", hint)

    if getattr(model, MARK, False):
        raise GymError(
            ErrorCode.USAGE, f"this {name} is being served already", "close that MultiVariantModel first"
        )
    if any(parameter.numel() == 0 for parameter in model.parameters()):
        raise GymError(
            ErrorCode.USAGE,
            f"this {name} has given up its weights: an earlier MultiVariantModel packed them",
            "load the model again",
        )
    if isinstance(model, PlainModel):
        return
    from transformers import PreTrainedModel

    from gym_fed.base.modeling.mixture_of_depths import RoutedModel

    if hasattr(model, "peft_config") or not isinstance(model, PreTrainedModel):
        raise refuse("it is not a plain transformers model", "merge its adapter, or serve that as a variant")
    if isinstance(model, RoutedModel):
        raise refuse("mixture of depths has no key-value cache", "serve a model without routers")
    if not model._supports_attention_backend:
        raise refuse("its attention cannot be replaced", "use a model such as Llama, Qwen3 or Mistral")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise refuse("it cannot leave logits out", "use a causal LM such as Llama, Qwen3 or Mistral")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        found_dtypes = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise refuse(f"its weights are {found_dtypes}", "load it in float32 or bfloat16")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise refuse("its weights are on several devices", "load it on one")
    if kernel != "exact" and next(iter(devices)).type != "cpu":
        raise GymError(ErrorCode.USAGE, f"kernel {kernel} is for the CPU", "use exact")
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_WINDOWED)
    if kinds:
        raise refuse(f"its layers are {', '.join(sorted(kinds))}", "use a model with ordinary attention")
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    stretching = {str(r.get("rope_type")) for r in scalings} & {"dynamic", "longrope"}
    if stretching:
        raise refuse(
            f"rope type {stretching.pop()} depends on the longest request of a step",
            "use yarn, linear or llama3",
        )


def language_part(model: Any) -> tuple[Any, Any]:
    """Return the config and body of the language model; for a vision model, those of its language part.

    The body is None for a model that keeps it under another name than Llama does.
    """
    text = model.config if isinstance(model, PlainModel) else model.config.get_text_config()
    return text, getattr(model, "model", None) if text is model.config else model.get_decoder()


def unfit(model: Any) -> str:
    """Return why ``Decoder`` cannot compute a model; empty if it can."""
    if isinstance(model, PlainModel):
        return ""
    config, body = language_part(model)
    whole = config is model.config
    kind, known = (type(model), DECODER_CLASSES) if whole else (type(body), _DECODER_BODIES)
    if kind.__name__ not in known or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is none of {', '.join(known)}"
    if next(model.parameters()).device.type != "cpu":
        return "it is not on the CPU"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}"
    if 2 * body.rotary_emb.inv_freq.numel() != body.layers[0].self_attn.head_dim:
        return "a part of each head is not rotated"
    for name, module in (model if whole else body).named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any(hooks) or "forward" in vars(module):
            return f"{name or 'the model'} has a hook"
        if isinstance(module, nn.Linear | nn.Embedding) and type(module) not in (nn.Linear, nn.Embedding):
            return f"{name} is a {type(module).__name__}"
    return ""


def base_format_for(requested: str, dtype: str, why_not: str, name: str) -> str | None:
    """Resolve the packed format of the linear layers; None leaves the model's own weights to torch.

    ``auto`` packs a bfloat16 base without loss if there is native code, which reads it twice as fast.

    Args:
        requested: ``auto``, or a format of ``gym_quant.linear``.
        dtype: The model's dtype.
        why_not: Why the decoder does not compute the model's steps; empty if it does.
        name: The name of the model, for the error.

    Raises:
        GymError: ``CONFIG_INVALID`` for a named format if transformers' forward computes the model.
    """
    if requested == "auto":
        return "bfloat16" if dtype == "bfloat16" and not why_not and dispatch.path() != "torch" else None
    if requested not in linear_formats():
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"base_format is {requested!r}",
            f"use auto, {' or '.join(linear_formats())}",
        )
    if why_not:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"base_format {requested}: {name} is served by transformers' own forward, as {why_not}",
            "leave base_format at auto",
        )
    return requested


def kernel_for(requested: str, base_format: str | None, model: Any) -> str:
    """Resolve the kernel of sign deltas: ``exact`` for a float32 base, ``lookup`` for one that already loses more.

    Args:
        requested: ``auto``, ``exact``, ``lookup`` or ``lookup16``.
        base_format: The configured format; None: the model's own weights.
        model: The model.
    """
    if requested != "auto":
        return requested
    weights = next(model.parameters())
    narrow = weights.dtype == torch.bfloat16 or base_format not in (None, "auto")
    return "lookup" if narrow and weights.device.type == "cpu" else "exact"
