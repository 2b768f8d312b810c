"""The check, before a model is served, that packed steps give the logits of transformers' own forward.

A model that ``Decoder`` computes is compared in float32 whatever the dtype of its weights, so that rounding is not part
of the difference. Others are computed in their own dtype by both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gym_fed.base.modeling.checkpoint import release_pages
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.base_weights import wide_product
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.decoder import Decoder
from gym_fed.serving.forward.kv_cache import KVCache, KVPool
from gym_fed.serving.forward.packed_base import PackedBase, Packer

_CLOSE = 1e-4
"""Tolerance of the logits' relative norm in float32. SmolLM2-135M has 2.8e-6, gym-nano 2.7e-7."""
_CLOSE_ROUNDED = 3e-1
"""Tolerance in bfloat16. Rounding alone moves the logits of random tokens by up to 0.15; a lost state gives about 1."""


class PackedSteps(Protocol):
    """The part of ``MultiVariantModel``, which imports this module, that is compared."""

    model: Any
    pool: KVPool
    vocabulary: int
    base_format: str

    @property
    def forward(self) -> str: ...

    def new_cache(self) -> KVCache: ...

    def step(self, chunks: Sequence[Chunk]) -> Tensor: ...


def tokens(vocabulary: int) -> list[int]:
    """Return five tokens, none of the first of the vocabulary, which are often special and handled arbitrarily."""
    return [(2 * at + 3) * vocabulary // 14 for at in range(5)]


def parts(vocabulary: int) -> list[list[int]]:
    """Split these tokens into chunks of a prompt, so that the last three have logits."""
    ids = tokens(vocabulary)
    return [ids[:3], ids[3:4], ids[4:]]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute activations in float32 within the block, with the same weights, which are widened block by block.

    Args:
        model: Has only linear layers and embeddings of ``torch.nn``, and norms that follow their input's dtype.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype != torch.float32:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
            undo.append(partial(delattr, module, "forward"))
        elif isinstance(module, nn.Embedding):
            undo.append(module.register_forward_hook(lambda _module, _args, output: output.float()).remove)
    try:
        yield
    finally:
        for step in undo:
            step()


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    product = wide_product(x, module.weight)
    return product if module.bias is None else product + module.bias.float()


@torch.inference_mode()
def stock_logits(model: Any) -> Tensor:
    """Return the logits of transformers' own forward for ``tokens``: ``[5, vocabulary]`` float32."""
    embedding = model.get_input_embeddings().weight
    ids = torch.tensor(tokens(embedding.shape[0]), device=embedding.device)
    places = torch.arange(len(ids), device=embedding.device)
    out = model(input_ids=ids[None], position_ids=places[None], use_cache=False)
    return torch.as_tensor(out.logits[0]).to(torch.float32)


def step_logits(served: PackedSteps) -> Tensor:
    """Return packed steps' logits for the last three ``tokens``, as a prompt in chunks next to another request."""
    cache, other = served.new_cache(), served.new_cache()
    logits = []
    for part in parts(served.vocabulary):
        logits.append(served.step([Chunk([1 % served.vocabulary], other), Chunk(part, cache)])[1])
    return torch.stack(logits)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two logits, relative to the norm of the expected ones."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-6))


def require_same(served: PackedSteps, stock: Tensor) -> None:
    """Compare the logits of packed steps with those of the stock forward.

    Mapped weights are released afterwards: both sides have read all of them, and packing reads them one by one.

    Args:
        served: The model; its pool is in float32 if activations are.
        stock: The result of ``stock_logits``.
    """
    off = distance(step_logits(served), stock[2:])
    if not off <= (_CLOSE if served.pool.dtype == "float32" else _CLOSE_ROUNDED):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(served.model).__name__} cannot be served: its logits in a packed step by {served.forward} are off "
            f"by {off:.1e} of their norm, so it has state besides keys and values",
            "use a decoder with ordinary attention, such as Llama, Qwen3 or Mistral",
        )
    for weight in served.model.parameters():
        release_pages(weight)


def require_windows(model: Any, windows: dict[int, int | None]) -> None:
    """Check that every layer passed the sliding window of its config, which a trial is too short to show."""
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
                "use a model that passes its window to its attention, such as Mistral or Qwen3",
            )


LOSS = {"bfloat16": 5e-2, "int8": 0.4}
"""The most loss of the logits' norm by a format; measured on SmolLM2, gym-nano and random models: 4.7e-3 and 8e-2."""
MOST_LOSS = 0.7
"""The loss for int4, which loses up to 0.16 there, and for formats of other packages."""
SAME = 5e-3
"""The tolerance for the same weights by other kernels, or by torch. Measured in all formats: at most 3.3e-4."""


def prepare(
    served: PackedSteps,
    decoder: Decoder,
    stock: Tensor | None,
    format: str | None,
    kept: PackedBase | None,
) -> None:
    """Compare, pack, and compare again.

    Args:
        served: The model, computed by the decoder.
        decoder: The decoder, on the model's own weights; packed afterwards.
        stock: The result of ``stock_logits``; None: computed where it is needed.
        format: The packed format; None: nothing is packed.
        kept: The base's file in that format.

    Raises:
        GymError: ``MODEL_INVALID`` if logits differ.
    """
    is_there = format is not None and kept is not None and kept.open(decoder.layers_in(format))
    if stock is None and not is_there:
        with in_float32(served.model):
            stock = stock_logits(served.model)
    if stock is not None:
        with decoder.compared():
            require_same(served, stock)
    if format is None:
        return
    decoder.pack(format, Packer() if kept is None else kept.pack)
    logits = step_logits(served)
    if kept is not None and kept.logits is not None:
        hint = f"delete {kept.path}: the next start packs the base anew, and compares it with its weights"
        _require(logits, kept.logits, SAME, f"packed {format}, from those that its file records,", hint)
    elif stock is not None and format == served.base_format:  # the weights' own dtype: nothing is lost
        _require(logits, stock[2:], SAME, f"packed {format}", _REPORT)
    elif stock is not None:
        _require(
            logits, _decoded(served, decoder), SAME, f"packed {format}, from the decoded weights',", _REPORT
        )
        limit = LOSS.get(format, MOST_LOSS)
        _require(logits, stock[2:], limit, f"packed {format}", "choose another base_format")
    for weight in served.model.parameters():
        release_pages(weight)  # of the embedding, which the comparisons read
    if kept is not None:
        kept.save(logits)


_REPORT = (
    "set GYM_KERNELS=torch, which uses none of the native code, and report it with your processor's name"
)


def _decoded(served: PackedSteps, decoder: Decoder) -> Tensor:
    """Compute the same logits from one chunk, so that every weight is decoded once."""
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
