"""Read a variant in the form that the plug-in serves: sign matrices, low-rank factors, norm and bias vectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from gym_quant import CodecError, get_codec
from gym_quant.kernels import SignMatrix
from gym_quant.resident import ResidentFactors
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.added_tokens import refuse_added
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.manifest import TensorRecord

DIGEST = re.compile(r"[0-9a-f]{64}")
"""Pattern of a variant's name in vLLM, the SHA-256 of its file."""

_OPEN_FILES = 4096
"""Number of files that stay memory-mapped. A variant that vLLM evicts is read again from its map, even if its file was
removed."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_WEIGHT = ".weight"


@dataclass(frozen=True)
class PluginVariant:
    """The deltas of one variant, by module. Sign matrices may be views of the mapped file.

    Attributes:
        signs: Sign matrices ``[out, in]`` of linear layers, embeddings and head.
        factors: Factors ``a`` ``[r, in]`` and ``b`` ``[out, r]`` of linear layers, including the scaling.
        norms: Deltas of norm weights, ``[size] float32``.
        biases: Deltas of the biases of linear layers, ``[out] float32``.
    """

    signs: Mapping[str, SignMatrix]
    factors: Mapping[str, tuple[Tensor, Tensor]]
    norms: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]

    @property
    def rank(self) -> int:
        """The largest rank of its factors; 0 without factors."""
        return max((len(a) for a, _ in self.factors.values()), default=0)


def require_servable(delta: DeltaFile, max_rank: int) -> None:
    """Check that the plug-in can serve every tensor of a delta, before vLLM loads it.

    An error inside a step of vLLM would stop the engine for all users.

    Args:
        delta: The delta.
        max_rank: Maximum rank of low-rank deltas (``vllm.max_lora_rank``).

    Raises:
        GymError: ``MODEL_INVALID`` naming the first tensor that cannot be served; ``BASE_MISMATCH`` for added tokens.
    """
    refuse_added(delta.vocabulary, delta.added_rows)
    for record in delta.manifest.tensors:
        if reason := _refusal(delta, record, max_rank):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{delta.path}: tensor {record.name!r} cannot be served by vLLM: {reason}",
                "serve it with engine: own, or encode the delta with bitdelta or lora",
            )


def _refusal(delta: DeltaFile, record: TensorRecord, max_rank: int) -> str:
    if len(record.shape) == 1:
        known = record.name.endswith((_WEIGHT, ".bias"))
        return "" if known else "a vector must be a norm's weight or a bias"
    if not record.name.endswith(_WEIGHT) or len(record.shape) != 2:
        return (
            f"a parameter of shape {list(record.shape)} is not the weight of a linear layer or an embedding"
        )
    form = get_codec(record.codec).merge_form(record.shape, record.params).kind
    if form == "signs":
        return ""
    if form != "factors":
        return f"codec {record.codec} is neither signs nor low-rank factors"
    if record.name.removesuffix(_WEIGHT) in (EMBEDDING, HEAD):
        return "a low-rank delta of the embeddings or the head is not supported"
    rank = len(_factors(delta, record)[0])
    return f"its rank {rank} exceeds vllm.max_lora_rank {max_rank}" if rank > max_rank else ""


def read_variant(delta: DeltaFile) -> PluginVariant:
    """Read a delta that ``require_servable`` accepts.

    Raises:
        CodecError: For a tensor whose codec has any other form.
    """
    signs: dict[str, SignMatrix] = {}
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    norms: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for record in delta.manifest.tensors:
        module, _, kind = record.name.rpartition(".")
        if len(record.shape) == 1:
            (biases if kind == "bias" else norms)[module] = delta.decode(record.name)
            continue
        codec = get_codec(record.codec)
        matrix = codec.signs(delta.payload(record.name), record.shape, record.params)
        if matrix is None:
            factors[module] = _factors(delta, record)
        else:
            signs[module] = matrix
    return PluginVariant(signs, factors, norms, biases)


def _factors(delta: DeltaFile, record: TensorRecord) -> tuple[Tensor, Tensor]:
    held = get_codec(record.codec).resident(
        delta.payload(record.name), record.shape, record.params, torch.device("cpu")
    )
    if not isinstance(held, ResidentFactors):
        raise CodecError(f"tensor {record.name!r}: codec {record.codec} has neither signs nor factors")
    return held.factors(torch.float32)


def object_path(objects: Path, digest: str) -> Path:
    """Return the path of a variant's file in a store's folder ``objects``."""
    return objects / digest[:2] / f"{digest}.gymdelta"


@lru_cache(maxsize=_OPEN_FILES)
def open_object(path: Path) -> DeltaFile:
    """Memory-map the file of a digest, and check that its bytes have this digest; it stays open.

    Raises:
        GymError: ``HASH_MISMATCH``; errors from ``DeltaFile.open``.
    """
    delta = DeltaFile.open(path)
    actual = delta.sha256()
    if actual != path.stem:
        delta.close()
        raise GymError(ErrorCode.HASH_MISMATCH, f"{path} hashes to {actual}, which does not match its name")
    return delta
