"""Comparison of a GGUF file with its model: every tensor, the settings of the forward pass, and the vocabulary.

Comparing answers does not reveal every wrong layer: quantisation loss hides a matrix that is 10% too large. Comparing
the token ids of texts does not reveal every wrong token: no text contains all tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_fed.base.imports.gguf.config import MODEL_TYPES
from gym_fed.base.imports.gguf.header import Header, read_header
from gym_fed.core.errors import GymError
from gym_fed.core.text import counted, plain
from gym_fed.export.gguf.rope import different_rotations
from gym_fed.export.process import Report
from gym_fed.export.source import differs

if TYPE_CHECKING:
    import torch


_AT_ONCE = 1 << 22
"""Number of values that are compared at once (tens of MiB)."""
_GEMMA3_BASE = 1e6
"""The RoPE base of a Gemma 3 file that does not state one."""
_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_ADDED_KINDS = (_CONTROL, _USER_DEFINED)
_MODELS = ("gpt2", "llama", "gemma4")
"""llama.cpp's tokenizers with the same tokens as ``tokenizer.json``: one byte-level, and two with pieces."""
_SPACE = "▁"
"""The character that SentencePiece writes for a space."""


def compare_stored(file: Path, model: Any, report: Report) -> dict[str, Any]:
    """Compare every tensor of a file, and the settings of its forward pass, with the model.

    Args:
        file: The written file.
        model: A transformers model with any adapter merged into its weights.
        report: Called with the number of compared tensors.

    Returns:
        ``compared`` tensors and the ``largest_error`` by type, relative to the largest value of a block (or to
        the value itself, if it is not quantised); or ``not_compared`` with the reason.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the tensor or the setting.
    """
    from gguf import GGMLQuantizationType

    from gym_fed.base.imports.gguf.reader import transformers_config
    from gym_fed.base.imports.gguf.tensors import mapped_tensors, offset_of, stored_values

    config = model.config
    if config.model_type not in MODEL_TYPES:
        return {"not_compared": f"the GGUF names of the parameters of {config.model_type} are unknown"}
    header = read_header(file)
    _require_settings(header, config)
    try:
        read = transformers_config(header)
    except GymError as error:
        return {"not_compared": f"its settings cannot be read: {error.message}"}
    _require_same_forward(read, config)
    try:
        mapped = mapped_tensors(header, config)
    except GymError as error:
        raise _differs(error.message) from error
    parameters = model.state_dict()
    largest: dict[str, float] = {}
    for done, tensor in enumerate(mapped):
        report("comparing tensors", done, len(mapped))
        kind = GGMLQuantizationType(tensor.stored.type).name
        expected = parameters[tensor.name].detach().float() + offset_of(tensor, config)
        stored = stored_values(tensor, config)
        tensor_error = largest_error(f"tensor {tensor.stored.name}", kind, expected, stored)
        largest[kind] = max(largest.get(kind, 0.0), tensor_error)
    report("comparing tensors", len(mapped), len(mapped))
    return {"compared": len(mapped), "largest_error": largest}


def largest_error(name: str, kind: str, expected: torch.Tensor, stored: torch.Tensor) -> float:
    """Return the largest error in any block of a tensor, relative to that block's largest value.

    Raises:
        GymError: ``EXPORT_DIFFERS``.
    """
    import torch

    if kind not in ROUNDINGS:
        raise _differs(f"{name} is {kind}, a type that gym-fed does not write")
    rounding = ROUNDINGS[kind]
    largest, product, square = 0.0, 0.0, 0.0
    step = _AT_ONCE // rounding.block
    parts = rounding.block // (rounding.part or rounding.block)
    ours, others = (values.reshape(-1, parts, rounding.block // parts) for values in (expected, stored))
    for first in range(0, len(ours), step):
        our_part, other = ours[first : first + step], others[first : first + step]
        error = (other - our_part).abs().amax(dim=2).double()
        of_part = our_part.abs().amax(dim=2).double()
        size = of_part.amax(dim=1, keepdim=True).expand_as(of_part)
        excess = error - rounding.least
        allowed = rounding.share * size + rounding.share_of_part * of_part
        beyond = ~(excess <= allowed)  # NaN is beyond, too
        if beyond.any():
            raise _differs(
                f"{name} ({kind}) is {float(error[beyond][0]):.3g} off in a block whose largest value is "
                f"{float(size[beyond][0]):.3g}, more than the rounding error of its type"
            )
        largest = max(largest, float((excess.clamp(min=0) / size.clamp(min=1e-30)).max()))
        product += float((our_part * other).sum(dtype=torch.float64))
        square += float((our_part * our_part).sum(dtype=torch.float64))
    if square and not abs(product / square - 1) <= rounding.scale + rounding.least:
        raise _differs(f"{name} ({kind}) is {product / square:.4f} times the source's")
    return largest


def _require_settings(header: Header, config: Any) -> None:
    """Compare the settings of the forward pass that a reader takes from the header.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the setting.
    """
    prefix = str(header.values.get("general.architecture"))
    for key, (expected, default) in _settings(config).items():
        value = header.values.get(f"{prefix}.{key}", default)
        if not isinstance(value, int | float) or np.float32(value) != np.float32(expected):
            raise _differs(f"{prefix}.{key} is {value} in the file, {expected} in the source")


_FORWARD = (
    "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob",
)  # fmt: skip
"""Config values whose effect may not show in texts of a few hundred tokens; compared if both configs have them."""
_WINDOWED = ("gemma2", "gemma3_text")
"""Model types whose sliding windows llama.cpp supports; ``rope_notes`` reports the others."""


def _require_same_forward(read: Any, config: Any) -> None:
    """Compare the rotary positions, windows, caps and experts in a file's header with the source's.

    Args:
        read: The config read from the header.
        config: The source model's config.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the setting.
    """
    windowed = ("sliding_window",) if config.model_type in _WINDOWED else ()
    for key in (*_FORWARD, *windowed):
        value, expected = getattr(read, key, None), getattr(config, key, None)
        if hasattr(read, key) and hasattr(config, key) and value != expected:
            raise _differs(f"{key} is {value} in the file, {expected} in the source")
    if problem := different_rotations(read, config):
        raise _differs(problem)


def _settings(config: Any) -> dict[str, tuple[float, float | None]]:
    """Return each setting's expected value, and its default in files that lack it (None if it is required)."""
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = _rope(config)
    is_gemma3 = config.model_type == "gemma3_text"
    settings: dict[str, tuple[float, float | None]] = {
        "block_count": (config.num_hidden_layers, None),
        "context_length": (config.max_position_embeddings, None),
        "embedding_length": (config.hidden_size, None),
        "feed_forward_length": (config.intermediate_size, None),
        "attention.head_count": (heads, None),
        "attention.head_count_kv": (config.num_key_value_heads, heads),
        "attention.key_length": (head, config.hidden_size // heads),
        "attention.value_length": (head, config.hidden_size // heads),
        "attention.layer_norm_rms_epsilon": (config.rms_norm_eps, None),
        "rope.freq_base": (rope["rope_theta"], _GEMMA3_BASE if is_gemma3 else 10000.0),
        "rope.dimension_count": (int(head * (rope.get("partial_rotary_factor") or 1)), head),
    }
    return settings


def _rope(config: Any) -> Mapping[str, Any]:
    """Return the rotary parameters; for Gemma 3 those of the global layers."""
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters.get("full_attention") or parameters


def compare_vocabulary(file: Path, tokenizer: Any) -> dict[str, Any]:
    """Compare a file's tokens, token types and merges with a tokenizer.

    Args:
        file: The written file.
        tokenizer: The source's ``transformers`` tokenizer.

    Returns:
        ``compared`` tokens, ``added`` tokens among them, and ``merges``; or ``not_compared`` with the reason.

    Raises:
        GymError: ``EXPORT_DIFFERS`` naming the token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"not_compared": "the source's tokenizer is not one of the tokenizers library"}
    header = read_header(file)
    state = json.loads(backend.to_str())
    model = header.values.get(f"{_PREFIX}model")
    if model not in _MODELS:
        return {"not_compared": f"the file's tokenizer model is {model}"}
    tokens: list[str] = header.values[f"{_PREFIX}tokens"]
    kinds = [int(kind) for kind in header.values[f"{_PREFIX}token_type"]]
    is_bytes = model == "gpt2"
    added = {token["id"]: token for token in state["added_tokens"]}
    ids = {number: text for text, number in _vocabulary(state["model"]).items()}
    if len(kinds) != len(tokens) or max([*ids, *added]) >= len(tokens):
        size = counted(len(tokens), "token")
        raise _other_vocabulary(f"it has {size}, but the tokenizer has {max([*ids, *added]) + 1}")
    unknown = state["model"].get("unk_token")
    for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        token = added.get(number)
        if token is None:
            expected = ids.get(number)
            if expected is None and kind != _UNUSED:
                raise _other_vocabulary(
                    f"token {number} is {_shown(text)}, but the tokenizer has no such token"
                )
            if expected is not None and (text != expected or (is_bytes and kind in _ADDED_KINDS)):
                raise _other_vocabulary(
                    f"token {number} is {_shown(text)} of kind {kind}, not {_shown(expected)}"
                )
            continue
        expected = token["content"]
        is_spaced = not (is_bytes or token["special"]) and (token["normalized"] or not expected.strip(_SPACE))
        spaced = expected.replace(_SPACE, " ") if is_spaced else expected
        its_kinds = (_CONTROL,) if token["special"] else _ADDED_KINDS
        has_its_kind = kind in its_kinds or (expected == unknown and kind == _UNKNOWN)
        if text not in (expected, spaced) or not has_its_kind:
            raise _other_vocabulary(
                f"added token {number} is {_shown(text)} of kind {kind}, not {_shown(expected)}"
            )
    merges = _compare_merges(header.values.get(f"{_PREFIX}merges", []), state["model"]) if is_bytes else None
    return {"compared": len({*ids, *added}), "added": len(added), "merges": merges}


def stripping_tokens(tokenizer: Any) -> list[str]:
    """Return the added tokens that strip adjacent white space or match only whole words, which GGUF does not record."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.lstrip or token.rstrip or token.single_word]


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer's model by text; a unigram model has a list of texts with scores."""
    vocabulary: Any = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {text: number for number, (text, _) in enumerate(vocabulary)}


def _compare_merges(stored: list[str], model: dict[str, Any]) -> int:
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges", [])]
    if list(stored) != merges:
        pairs = zip([*stored, None], [*merges, None], strict=False)
        number, (other, own) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        raise _other_vocabulary(f"merge {number} is {_shown(other)}, not {_shown(own)}")
    return len(merges)


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(plain(text, 60))


def _other_vocabulary(why: str) -> GymError:
    return _differs(f"the vocabulary differs from the tokenizer's: {why}")


def _differs(why: str) -> GymError:
    return differs(f"the file differs from the source: {why}")


_HALF = 2.0**-11
"""The largest relative rounding error of a float16."""
_SMALLEST = 2.0**-25
"""The largest rounding error near 0: half of the smallest float16."""
_SIX_BITS = 0.5 / 63
"""The largest rounding error of a 6-bit scale, relative to the largest scale of its block."""


@dataclass(frozen=True)
class Rounding:
    """The bounds on one type's rounding error.

    A block's error is at most a share of its largest magnitude. Blocks of the K types have parts with their own scales,
    which add a share of the part's largest magnitude. Each share follows from the layout (``ggml-quants.c``): the
    widest step between two levels, and the rounding of the scales. The scales are float16, whose smallest numbers are
    ``2^-24`` apart: half of that, times the highest multiple of a scale, is allowed in any block.

    Attributes:
        block: The number of values that share a float16 scale.
        share: The largest error, relative to the largest magnitude of the block.
        least: The absolute error that is allowed in any block.
        scale: The largest deviation of the whole tensor's scale from the source's, by least squares. Rounding
            to levels leaves it near 1 (Q5_1 of SmolLM2's matrices is 1.9% off); a wrongly scaled tensor would stay
            within ``share`` if there are few levels.
        part: The number of values in a part, which has its own scale; 0 if blocks have no parts.
        share_of_part: A further allowed error, relative to the largest magnitude of the part.
    """

    block: int
    share: float
    least: float
    scale: float
    part: int = 0
    share_of_part: float = 0.0

    @property
    def most(self) -> float:
        """The largest error of any value, relative to the largest magnitude in its block."""
        return self.share + self.share_of_part


def _one_step(block: int, levels: int, scale: float) -> Rounding:
    """Return the rounding for levels from ``-levels`` to ``levels - 1``; the last one may be a step off."""
    return Rounding(block, 1 / levels + _HALF, levels * _SMALLEST, scale)


def _with_minima(top: int, scale: float) -> Rounding:
    """Return the rounding for levels from 0 to ``top`` above a minimum, with scales in 6 bits.

    The search for scales may lose half a step at one end to reduce the block's total error, so one step is allowed.
    """
    return Rounding(256, 3 * (_SIX_BITS + _HALF), 63 * (top + 1) * _SMALLEST, scale, 32, 2 / top)


ROUNDINGS = {
    "F32": Rounding(1, 0.0, 0.0, 0.0),
    "F16": Rounding(1, _HALF, _SMALLEST, _HALF),
    "BF16": Rounding(1, 2.0**-8, 2.0**-134, 2.0**-8),
    "Q8_0": Rounding(32, 0.5 / 127 + _HALF, 127 * _SMALLEST, 1e-3),
    "Q6_K": Rounding(256, 0.5 / 128 + _HALF, 128 * 32 * _SMALLEST, 5e-3, 16, 1 / 31),
    "Q5_K": _with_minima(31, 2e-2),
    "Q4_K": _with_minima(15, 3e-2),
    "Q5_1": Rounding(32, 1 / 31 + 3 * _HALF, 32 * _SMALLEST, 5e-2),
    "Q5_0": _one_step(32, 16, 1e-2),
    "Q4_0": _one_step(32, 8, 3e-2),
}
"""The rounding bounds of each type that gym-fed writes, by name."""
