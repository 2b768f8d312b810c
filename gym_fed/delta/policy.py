"""Classify tensors by their place in a model, and choose codecs under a policy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gym_quant.codec import CodecError, Unsuited
from gym_quant.integers import IntegerCodec
from gym_quant.registry import get_codec
from torch import Tensor, nn

from gym_fed.config.delta import ROW, SAME_ROW, CodecPolicy, codec_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.manifest import TensorRecord

_EMBEDDING = re.compile(r"(^|[._])(embed(?!_out)\w*|\w*embeddings?|wte|wpe)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)(\.|$)")
_DEFAULTS = {
    "auto": ("bitdelta", "auto: sign bits, 16 times smaller than bfloat16"),
    "as-merged": ("dense", "as merged: values, since it has no factors"),
}


@dataclass(frozen=True)
class CodecChoice:
    """A tensor's record, its payload size, and the reason as text."""

    record: TensorRecord
    payload_bytes: int
    why: str


def parts_of(shapes: Mapping[str, tuple[int, ...]], model: nn.Module | None = None) -> dict[str, str]:
    """Classify each tensor as ``embeddings``, ``head`` or ``body``, by the model if given, else by name.

    In a model, embeddings are the weights of its ``nn.Embedding`` modules and its input embeddings, and the head is
    its output embeddings. A head tied to the embeddings is listed once, as embeddings. For names,
    see ``part_of``.
    """
    by_name = {name: part_of(name, shape) for name, shape in shapes.items()}
    if model is None:
        return by_name
    ends = {}
    for kind, modules in (
        ("head", [_end(model, "get_output_embeddings")]),
        ("embeddings", [_end(model, "get_input_embeddings"), *model.modules()]),
    ):
        for module in modules:
            named = kind == "head" or module is modules[0] or isinstance(module, nn.Embedding)
            if named and getattr(module, "weight", None) is not None:
                ends[id(module.weight)] = kind  # type: ignore[union-attr]
    parts = {
        name: ends.get(id(parameter), "body") if parameter.ndim == 2 else "body"
        for name, parameter in model.named_parameters()
    }
    return {name: parts.get(name, part) for name, part in by_name.items()}


def part_of(name: str, shape: tuple[int, ...]) -> str:
    """Classify a matrix as ``embeddings``, ``head`` or ``body`` by its name in transformers models.

    Heads are ``lm_head`` and ``embed_out``; embeddings are parts of the name that begin or end with ``embed`` or
    ``embeddings``, and GPT-2's ``wte`` and ``wpe``.
    """
    if len(shape) != 2:
        return "body"
    if _HEAD.search(name):
        return "head"
    return "embeddings" if _EMBEDDING.search(name) else "body"


def choose(
    name: str, delta: Tensor, policy: CodecPolicy, part: str | None = None, exponent: int | None = None
) -> CodecChoice:
    """Choose codec and parameters for one tensor, given its (error-corrected) delta and its part (``parts_of``).

    A delta on the meta device, whose values are not known yet, gets the parameters that take the most bytes.
    ``exponent`` is that of the step, for codecs whose deltas add up; such a codec encodes every tensor.
    """
    shape = tuple(delta.shape)
    if adding_codec(policy) is not None:
        return choice_of(name, delta, policy.codec, policy, "policy", exponent)
    if len(shape) < 2 or math.prod(shape) <= policy.small_max_elements:
        kind = "one-dimensional" if len(shape) < 2 else f"at most {policy.small_max_elements} elements"
        return choice_of(name, delta, policy.small_tensors, policy, f"small ({kind}): small_tensors")
    part = part or part_of(name, shape)
    part_codec = {"embeddings": policy.embeddings, "head": policy.head}.get(part, "same")
    if part_codec not in ("same", SAME_ROW):
        return choice_of(name, delta, part_codec, policy, f"{part}: {part_codec}")
    word, why = _DEFAULTS.get(policy.codec, (policy.codec, "policy"))
    if part_codec == SAME_ROW and policy.gives_rows and get_codec(word).has_scales:
        word, why = f"{word}{ROW}", f"{why}; {part}: one scale per row"
    return choice_of(name, delta, word, policy, why)


def adding_codec(policy: CodecPolicy) -> IntegerCodec | None:
    """Return the policy's codec if its deltas add up as integers; else None."""
    codec = None if policy.codec in _DEFAULTS else get_codec(policy.codec)
    return codec if isinstance(codec, IntegerCodec) else None


def choice_of(
    name: str, delta: Tensor, word: str, policy: CodecPolicy, why: str, exponent: int | None = None
) -> CodecChoice:
    """Resolve a policy's codec word, a name or ``NAME-row``, with the policy's parameters.

    Raises:
        GymError: ``DELTA_INVALID`` naming the tensor that the codec cannot encode.
    """
    shape, member = tuple(delta.shape), get_codec(codec_of(word))
    words = {**policy.model_dump(), "exponent": exponent}
    if word.endswith(ROW):
        words["group_size"] = "row"
    try:
        params, decided = member.parameters(words, shape, None if delta.is_meta else delta)
    except Unsuited as error:
        return choice_of(name, delta, error.instead, policy, str(error))
    except CodecError as error:
        raise GymError(ErrorCode.DELTA_INVALID, f"tensor {name!r}: {error}") from error
    why = f"{why}; {decided}" if decided else why
    record = TensorRecord(name, shape, member.name, params)
    return CodecChoice(record, member.payload_bytes(shape, params), why)


def _end(model: nn.Module, getter: str) -> nn.Module | None:
    """Return the model's embeddings or head, if its class provides them."""
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(module, nn.Module) else None
