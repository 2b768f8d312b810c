"""Check, before a model is served, that packed steps can compute it and give the same logits as transformers.

Properties that do not require running the model are checked first. Then logits are compared. If ``Decoder`` computes
the model, they are in float32 for any dtype of the weights, to exclude rounding; otherwise they are in the model's own
dtype on both sides. The ``auto`` formats are also resolved here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from gym_quant.kernels import dispatch, native
from gym_quant.linear import linear_formats
from torch import Tensor, nn

from gym_fed.base.modeling.checkpoint import release_pages
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.serving.forward.base_weights import in_float32
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.decoder import Decoder
from gym_fed.serving.forward.kv_cache import KVCache, KVPool
from gym_fed.serving.forward.model_arguments import LONGROPE, rope_types, text_arguments
from gym_fed.serving.forward.packed_base import PackedBase, Packer
from gym_fed.serving.forward.plain_config import DECODER_CLASSES
from gym_fed.serving.forward.plain_model import PlainModel, language_part

MARK = "_gym_fed_multi_variant"
"""Attribute that marks a model as being served."""
_DECODER_BODIES = tuple(name.replace("ForCausalLM", "Model") for name in DECODER_CLASSES.values())
"""Body classes of models that read pictures."""
_WINDOWED = ("full_attention", "sliding_attention")


def require_servable(model: nn.Module, kernel: str) -> None:
    """Refuse a model that cannot be served, as far as this can be determined without running it."""
    name = type(model).__name__

    def refuse(why: str, hint: str) -> GymError:
        return GymError(ErrorCode.MODEL_INVALID, f"{name} cannot be served: {why}", hint)

    if getattr(model, MARK, False):
        raise GymError(
            ErrorCode.USAGE, f"this {name} is already being served", "close that MultiVariantModel first"
        )
    if any(parameter.numel() == 0 for parameter in model.parameters()):
        raise GymError(
            ErrorCode.USAGE,
            f"this {name} no longer has its weights: an earlier MultiVariantModel packed them",
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
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise refuse(f"its weights are {names}", "load it in float32 or bfloat16")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise refuse("its weights are on several devices", "load it on one device")
    if kernel != "exact" and next(iter(devices)).type != "cpu":
        raise GymError(ErrorCode.USAGE, f"kernel {kernel} runs only on the CPU", "use exact")
    if "dynamic" in rope_types(model):
        raise refuse("rope type dynamic depends on the longest request so far", "use yarn, linear or llama3")


def unservable(model: Any, error: Exception) -> GymError:
    """Return the error for a model whose forward failed at opening."""
    if isinstance(error, GymError):
        return error
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{type(model).__name__} cannot be served: its forward pass failed: {type(error).__name__}: {error}"[
            :500
        ],
        "use a model such as Llama, Qwen3 or Mistral",
    )


def unpacked(model: Any) -> str:
    """Return why packed steps cannot compute a model, judged without running it; empty if there is no known reason."""
    if isinstance(model, PlainModel):
        return ""
    if not (model._supports_attention_backend or _decoder_supports_it(model)):
        return "its attention cannot be replaced"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - set(_WINDOWED)
    if kinds:
        return f"its layers are {', '.join(sorted(kinds))}"
    if LONGROPE in rope_types(model):
        return "rope type longrope depends on the longest request of a step"
    return ""


def _decoder_supports_it(model: Any) -> bool:
    """Return True if the attention of the language model inside an audio model (Qwen2-Audio) can be replaced."""
    decoder = model.get_decoder()
    return decoder is not model and bool(getattr(decoder, "_supports_attention_backend", False))


def unfit(model: Any) -> str:
    """Return why ``Decoder`` cannot compute a model; empty if it can."""
    if isinstance(model, PlainModel):
        return ""
    config, body = language_part(model)
    is_text = config is model.config
    kind, known = (type(model), tuple(DECODER_CLASSES.values())) if is_text else (type(body), _DECODER_BODIES)
    if kind.__name__ not in known or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is not one of {', '.join(known)}"
    if next(model.parameters()).device.type != "cpu":
        return "it is not on the CPU"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}"
    if 2 * body.rotary_emb.inv_freq.numel() != body.layers[0].self_attn.head_dim:
        return "part of each head is not rotated"
    for name, module in (model if is_text else body).named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any(hooks) or "forward" in vars(module):
            return f"{name or 'the model'} has a hook"
        if isinstance(module, nn.Linear | nn.Embedding) and type(module) not in (nn.Linear, nn.Embedding):
            return f"{name} is a {type(module).__name__}"
    return ""


def base_format_for(requested: str, dtype: str, why_not: str, name: str) -> str | None:
    """Resolve the packed format of the linear layers; None leaves the model's own weights to torch.

    With native code, ``auto`` packs a bfloat16 base without loss, and a step reads it twice as fast.

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
            f"base_format {requested}: {name} is served by transformers' own forward pass, because {why_not}",
            "leave base_format at auto",
        )
    return requested


def kernel_for(requested: str, base_format: str | None, model: Any) -> str:
    """Resolve the kernel of sign deltas: ``exact`` for a float32 base, ``lookup`` for a base whose format loses more.

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


_CLOSE = 1e-4
"""Tolerance of the logits' relative norm in float32. SmolLM2-135M has 2.8e-6, gym-nano 2.7e-7."""
_CLOSE_ROUNDED = 3e-1
"""Tolerance in bfloat16. Rounding alone moves the logits of random tokens by up to 0.15; a lost state gives about 1."""


class PackedSteps(Protocol):
    """The part of ``MultiVariantModel`` that is compared; a protocol, since that module imports this one."""

    model: Any
    pool: KVPool
    vocabulary: int
    base_format: str

    @property
    def forward(self) -> str: ...

    def new_cache(self) -> KVCache: ...

    def step(self, chunks: Sequence[Chunk]) -> Tensor: ...


def tokens(vocabulary: int) -> list[int]:
    """Return five tokens, avoiding the first of the vocabulary, which are often special tokens."""
    return [(2 * at + 3) * vocabulary // 14 for at in range(5)]


def parts(vocabulary: int) -> list[list[int]]:
    """Split ``tokens`` into chunks of a prompt, so that the last three have logits."""
    ids = tokens(vocabulary)
    return [ids[:3], ids[3:4], ids[4:]]


@torch.inference_mode()
def transformers_logits(model: Any) -> Tensor:
    """Return the logits of transformers' own forward pass for ``tokens``: ``[5, vocabulary]`` float32."""
    embedding = model.get_input_embeddings().weight
    ids = torch.tensor(tokens(embedding.shape[0]), device=embedding.device)
    out = model(**text_arguments(model, ids))
    return torch.as_tensor(out.logits[0]).to(torch.float32)


def step_logits(served: PackedSteps) -> Tensor:
    """Return the logits of packed steps for the last three ``tokens``, computed in chunks.

    Another request is in every step but the last one, since kernels for one row differ from those for several.
    """
    cache, other = served.new_cache(), served.new_cache()
    chunks = [Chunk(part, cache) for part in parts(served.vocabulary)]
    beside = Chunk([1 % served.vocabulary], other)
    steps = [*([beside, chunk] for chunk in chunks[:-1]), chunks[-1:]]
    return torch.stack([served.step(step)[-1] for step in steps])


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two logits, relative to the norm of the expected ones."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-6))


def tolerance(served: PackedSteps) -> float:
    """Return the tolerance for the logits of a model whose steps are computed in the dtype of its pool."""
    return _CLOSE if served.pool.dtype == "float32" else _CLOSE_ROUNDED


def require_same(served: PackedSteps, stock: Tensor) -> None:
    """Compare the logits of packed steps with those of the stock forward pass.

    The pages of memory-mapped weights are released afterwards, since packing reads the weights one by one.

    Args:
        served: The model; its pool is in float32 if activations are.
        stock: The result of ``transformers_logits``.
    """
    off = distance(step_logits(served), stock[2:])
    if not off <= tolerance(served):
        reason = (
            ""
            if served.forward == "decoder"
            else ", so it has state outside its cache, or its tokens attend to later ones"
        )
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(served.model).__name__} cannot be served: its logits in a step by {served.forward} are off "
            f"by {off:.1e} of their norm{reason}",
            "use a decoder with ordinary attention, such as Llama, Qwen3 or Mistral",
        )
    for weight in served.model.parameters():
        release_pages(weight)


def require_windows(model: Any, windows: dict[int, int | None]) -> None:
    """Check that every layer passed its config's sliding window, since a trial's text is too short to show it."""
    config: Any = model.config.get_text_config()
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        slides = size is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    for layer, kind in enumerate(kinds):
        expected = size if kind == "sliding_attention" else None
        if layer not in windows or windows[layer] != expected:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{type(model).__name__} cannot be served: layer {layer} should have a sliding window of "
                f"{expected}, but its attention uses {windows.get(layer, 'no keys at all')}",
                "use a model that passes its window to the attention, such as Mistral or Qwen3",
            )


LOSS = {"bfloat16": 5e-2, "int8": 0.4}
"""Maximum relative error of the logits by format; measured on SmolLM2, gym-nano and random models: 4.7e-3 and 8e-2."""
MAX_LOSS = 0.7
"""Maximum error for int4, which has up to 0.16 on these models, and for formats from other packages."""
ROUNDED = 0.15
"""Maximum error from activations in bfloat16, on processors with such products. Measured: up to 1.8e-2, on SmolLM2."""
SAME = 5e-3
"""Tolerance between kernels, or a kernel and torch, with the same weights. Measured in all formats: at most 3.3e-4."""


def prepare(
    served: PackedSteps, decoder: Decoder, stock: Tensor | None, format: str | None, kept: PackedBase | None
) -> None:
    """Compare logits, pack the weights, and compare again.

    Args:
        served: The model, computed by the decoder.
        decoder: The decoder, on the model's own weights; packed afterwards.
        stock: The result of ``transformers_logits``; None: computed on demand.
        format: The packed format; None: nothing is packed.
        kept: The base's file in that format.

    Raises:
        GymError: ``MODEL_INVALID`` if logits differ.
    """
    is_there = format is not None and kept is not None and kept.open(decoder.layers_in(format))
    if stock is None and not is_there:
        with in_float32(served.model):
            stock = transformers_logits(served.model)
    if stock is not None:
        with decoder.compared():
            require_same(served, stock)
    if format is None:
        return
    decoder.pack(format, Packer() if kept is None else kept.pack)
    with native.without(native.HAS_BF16):  # activations stay in float32
        logits = step_logits(served)
    if kept is not None and kept.logits is not None:
        hint = f"delete {kept.path}: the next run packs the base again, and compares it with its weights"
        _require(logits, kept.logits, SAME, f"packed {format}, from those recorded in its file,", hint)
    elif stock is not None and format == served.base_format:  # the weights' own dtype: nothing is lost
        _require(logits, stock[2:], SAME, f"packed {format}", _REPORT)
    elif stock is not None:
        _require(
            logits, _decoded(served, decoder), SAME, f"packed {format}, from the decoded weights',", _REPORT
        )
        limit = LOSS.get(format, MAX_LOSS)
        _require(logits, stock[2:], limit, f"packed {format}", "choose another base_format")
    if format == "bfloat16" and (native.features() or 0) & native.HAS_BF16:
        _require(step_logits(served), logits, ROUNDED, "products of bfloat16", _REPORT)
    for weight in served.model.parameters():
        release_pages(weight)  # the comparisons have read the embedding
    if kept is not None:
        kept.save(logits)


_REPORT = "set GYM_KERNELS=torch, which avoids the native code, and report it with your processor's name"


def _decoded(served: PackedSteps, decoder: Decoder) -> Tensor:
    """Compute the logits of ``step_logits`` from one chunk, so that every weight is decoded once."""
    with decoder.compared():
        return served.step([Chunk(tokens(served.vocabulary), served.new_cache(), num_logits=3)])


def _require(actual: Tensor, expected: Tensor, limit: float, name: str, hint: str) -> None:
    off = distance(actual, expected) if actual.shape == expected.shape else float("inf")
    if not off <= limit:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"the base cannot be served: its logits in {name} are off by {off:.1e} of their norm, over {limit}",
            hint,
        )


_log = logging.getLogger(__name__)
_SEEN = 3


def require_causal(model: Any) -> None:
    """Refuse a model whose logits depend on later tokens, by their gradient, which is exactly 0 in a causal model.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    embedded: list[Tensor] = []

    def watch(_module: Any, _args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # CTRL multiplies its embedding's output in place

    embedding = model.get_input_embeddings()
    ids = torch.tensor(tokens(embedding.weight.shape[0]), device=embedding.weight.device)
    hook = embedding.register_forward_hook(watch)
    try:
        with torch.enable_grad():
            logits = model(**text_arguments(model, ids)).logits
            (gradient,) = torch.autograd.grad(logits[0, :_SEEN].float().sum(), embedded[:1])
    except Exception as error:  # noqa: BLE001 - a model's own kernels may have no gradients
        _log.warning(
            "%s has no gradients (%s): comparing only its logits", type(model).__name__, plain(error, 100)
        )
        return
    finally:
        hook.remove()
    if bool((gradient[0, _SEEN:].abs() > 0).any()):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(model).__name__} cannot be served: its tokens attend to later ones",
            "if it was trained as a decoder, set is_decoder: true in its config.json",
        )
