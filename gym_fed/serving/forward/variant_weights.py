"""The in-memory form of variants: the delta of each parameter, how it is loaded, and the source of variants.

The delta's codec determines the form (``Codec.resident``): packed, or factors. Deltas of other codecs are decoded to
the base's dtype when they are loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from gym_quant import CodecError, get_codec
from gym_quant.codec import as_matrix
from gym_quant.resident import Resident, ResidentFactors, Transposed
from torch import Tensor, nn
from torch.nn import functional

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.added_tokens import AddedTokens, split_rows
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule

if TYPE_CHECKING:
    from gym_fed.delta.file import DeltaFile
    from gym_fed.delta.manifest import TensorRecord


class VariantWeight(ABC):
    """The delta of one parameter in memory."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes in memory."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return rows ``[n] int64`` of a matrix's delta as ``[n, cols]``, for embeddings."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True, eq=False)
class VocabularyRows:
    """The rows of a variant's added tokens, which follow the base's rows or replace the last ones.

    Attributes:
        first: The token of the first row.
        embeddings: The embedding module's output for each token, ``[rows, hidden]``.
        head: The rows of the head, ``[rows, hidden]``.
        bias: The biases of the head's rows, ``[rows]``; None if the head has no bias.
    """

    first: int
    embeddings: Tensor
    head: Tensor
    bias: Tensor | None = None

    @property
    def size(self) -> int:
        """The number of token ids of the variant."""
        return self.first + len(self.head)

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory."""
        tensors = (self.embeddings, self.head, *(() if self.bias is None else (self.bias,)))
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class VariantTokens:
    """The tokenizer of a variant as an addition to the base's.

    Attributes:
        delta_sha256: The SHA-256 of the variant's file.
        tokens: The tokens.
        size: The number of token ids; None if it is the base's.
    """

    delta_sha256: str
    tokens: AddedTokens
    size: int | None


@dataclass(frozen=True, eq=False)
class LoadedVariant:
    """The deltas that a variant adds to the base.

    Attributes:
        name: The variant for which the file was loaded; other variants with the same file share this object.
        delta_sha256: The SHA-256 of the file.
        weights: The deltas by name of the base's parameter; absent parameters are unchanged.
        resident_bytes: Bytes in memory.
        vocabulary: The rows of its added tokens; None if it has the base's vocabulary.
    """

    name: str
    delta_sha256: str
    weights: Mapping[str, VariantWeight]
    resident_bytes: int
    vocabulary: VocabularyRows | None = None

    @cached_property
    def replaced(self) -> dict[str, Tensor]:
        """The parameters that replace those of the base; a variant that has any does not share forward passes."""
        return {name: o.parameter for name, o in self.weights.items() if isinstance(o, ReplacedWeight)}


class VariantSource(Protocol):
    """The interface that supplies the engine with variants. All methods are thread-safe; only ``acquire`` may block."""

    def prefetch(self, name: str, user: str) -> None:
        """Start loading a variant in the background, for a request of ``user``.

        Raises:
            GymError: ``NOT_FOUND`` for a name that is not registered.
        """

    def poll(self, name: str, user: str) -> LoadedVariant | None:
        """Return the variant, pinned until ``release``, if it is in memory; otherwise start its load and return None.

        Raises:
            GymError: If it cannot be loaded: ``NOT_FOUND``, ``SIGNATURE_INVALID``, ``HASH_MISMATCH``, ...
        """

    def added_tokens(self, name: str) -> VariantTokens | None:
        """Return the tokens that a variant adds to the base's tokenizer, or None. May block briefly."""

    def lacks_room(self, name: str) -> bool:
        """Return True if a variant for which ``poll`` returned None is waiting for memory that other variants use."""

    def acquire(self, name: str) -> LoadedVariant:
        """Wait for the variant, and return it, pinned until ``release``. Raises the errors of ``poll``."""

    def release(self, variant: LoadedVariant) -> None:
        """Unpin one use of a variant."""


@dataclass(frozen=True, eq=False)
class PackedWeight(VariantWeight):
    """A packed delta ``[out, in]``: sign bits and scales, codes and scales, or the form of another package."""

    held: Resident

    @property
    def resident_bytes(self) -> int:
        return self.held.nbytes

    def rows(self, rows: Tensor) -> Tensor:
        return self.held.decode_rows(rows)


@dataclass(frozen=True, eq=False)
class FactorWeight(VariantWeight):
    """The factors of a low-rank delta; ``transposed`` if the parameter is stored as ``[in, out]``."""

    held: ResidentFactors
    transposed: bool = False

    @property
    def resident_bytes(self) -> int:
        return self.held.nbytes

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``[r, in]`` and ``[out, r]`` in the step's dtype, with the scaling in one of them."""
        a, b = self.held.factors(dtype)
        return (b.T, a.T) if self.transposed else (a, b)

    def rows(self, rows: Tensor) -> Tensor:
        return self.held.decode_rows(rows)


@dataclass(frozen=True, eq=False)
class DenseWeight(VariantWeight):
    """A dense delta ``[out, in]`` in the base's dtype, for codecs without a packed form."""

    matrix: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.matrix.nbytes

    def rows(self, rows: Tensor) -> Tensor:
        return self.matrix[rows]


@dataclass(frozen=True, eq=False)
class VectorWeight(VariantWeight):
    """The delta of a norm's weight or a bias in float32, for any codec."""

    values: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, eq=False)
class ReplacedWeight(VariantWeight):
    """A parameter with its delta added, which replaces the base's in forward passes of this variant."""

    parameter: Tensor

    @property
    def resident_bytes(self) -> int:
        return self.parameter.nbytes


def load_variant_weights(delta: DeltaFile, layout: ModelLayout) -> dict[str, VariantWeight]:
    """Load a delta into memory. The tensors do not reference the file, whose pages are released.

    Raises:
        GymError: ``BASE_MISMATCH`` for a tensor that the base lacks or has in a different shape; ``MODEL_INVALID`` for
            one that the multi-variant step cannot add to; ``DELTA_INVALID`` if its codec fails. All name the tensor.
    """
    require_servable_delta(delta, layout)
    weights: dict[str, VariantWeight] = {}
    for record in delta.manifest.tensors:
        if split_rows(record.name) is not None:
            continue
        try:
            weights[record.name] = _variant_weight(delta, record, layout)
        except CodecError as error:
            raise GymError(
                ErrorCode.DELTA_INVALID, f"{delta.path}: tensor {record.name!r}: {error}"
            ) from error
        delta.release(record.name)
    return weights


def require_servable_delta(delta: DeltaFile, layout: ModelLayout) -> None:
    """Check, by its manifest, that a delta can be served as a variant of a base.

    Raises:
        GymError: ``BASE_MISMATCH`` or ``MODEL_INVALID``, as in ``load_variant_weights``.
    """
    _vocabulary_modules(delta, layout)
    for record in delta.manifest.tensors:
        if split_rows(record.name) is not None:
            continue
        parameter = layout.parameters.get(record.name)
        if parameter is None or parameter.shape != record.shape:
            there = list(parameter.shape) if parameter is not None else "absent"
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{delta.path}: tensor {record.name!r} {list(record.shape)} does not fit the base: {there}",
                "use the base that the delta was made from",
            )
        if parameter.refusal:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{delta.path}: tensor {record.name!r} cannot be served as a variant: {parameter.refusal}",
                "remove this tensor from the delta, or merge the delta and serve the merged model",
            )


def loaded_variant(name: str, delta: DeltaFile, layout: ModelLayout, sha256: str) -> LoadedVariant:
    """Load a variant for serving. Raises the errors of ``load_variant_weights``."""
    weights = load_variant_weights(delta, layout)
    rows = _vocabulary_rows(delta, layout)
    size = sum(o.resident_bytes for o in weights.values()) + (0 if rows is None else rows.resident_bytes)
    return LoadedVariant(name, sha256, weights, size, rows)


def _vocabulary_modules(delta: DeltaFile, layout: ModelLayout) -> tuple[TargetModule, TargetModule] | None:
    """Return the embedding and the head to which a delta adds rows; None if it adds none.

    Raises:
        GymError: ``MODEL_INVALID`` if other modules of the base also depend on the vocabulary's size.
    """
    rows = delta.added_rows
    if rows is None:
        return None
    of_rows = [target for target in layout.target_modules if target.weight in rows.names]
    embeddings = [target for target in of_rows if target.kind == "embedding"]
    heads = [target for target in of_rows if target.kind == "linear"]
    known = {name for target in of_rows for name in (target.weight, target.bias)}
    if len(embeddings) != 1 or len(heads) != 1 or not known.issuperset(rows.names):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{delta.path}: its added tokens cannot be served as a variant: this base has no embedding and head of "
            f"{', '.join(rows.names)} to which rows can be added",
            "apply it and serve the model: gym delta apply BASE FILE -o FOLDER",
        )
    return embeddings[0], heads[0]


def _vocabulary_rows(delta: DeltaFile, layout: ModelLayout) -> VocabularyRows | None:
    modules = _vocabulary_modules(delta, layout)
    if modules is None or delta.added_rows is None:
        return None
    embedding, head = modules

    def rows(name: str | None) -> Tensor:
        values = delta.decode_added(str(name)).to(torch.device(layout.device), getattr(torch, layout.dtype))
        if not bool(torch.isfinite(values).all()):
            raise GymError(ErrorCode.DELTA_INVALID, f"{delta.path}: the rows of {name} are not finite")
        return values

    embeddings = rows(embedding.weight)
    own = embeddings if head.weight == embedding.weight else rows(head.weight)
    bias = rows(head.bias) if head.bias in delta.added_rows.names else None
    return VocabularyRows(delta.added_rows.first, embeddings * embedding.multiplier, own, bias)


def _variant_weight(delta: DeltaFile, record: TensorRecord, layout: ModelLayout) -> VariantWeight:
    device, dtype = torch.device(layout.device), getattr(torch, layout.dtype)
    parameter = layout.parameters[record.name]
    if parameter.kind == "replaced":
        base = layout.replaceable[record.name]
        changed = base.to(torch.float32) + delta.decode(record.name).reshape(base.shape).to(device)
        _require_finite("the delta", changed)
        return ReplacedWeight(changed.to(base.dtype))
    if parameter.kind in ("norm", "bias"):
        return VectorWeight(delta.decode(record.name).to(device))
    transposed = parameter.kind == "transposed"
    held = get_codec(record.codec).resident(delta.payload(record.name), record.shape, record.params, device)
    if held is None:
        dense = delta.decode(record.name).reshape(as_matrix(record.shape))
        dense = (dense.T if transposed else dense).to(device, dtype).contiguous()
        _require_finite("the delta", dense)
        return DenseWeight(dense)
    if isinstance(held, ResidentFactors):
        a, b = held.factors(dtype)
        _require_finite("factor A", a)
        _require_finite(f"factor B times its scaling {held.scaling}", b)
        return FactorWeight(held.scaled_once(dtype), transposed)
    _require_finite("the delta", torch.tensor(held.largest()).to(dtype))
    if transposed:
        held = Transposed(held)
    return PackedWeight(held.for_kernel(layout.kernel))


def _require_finite(name: str, values: Tensor) -> None:
    """Check values in the step's dtype, since the factors of all variants share one product.

    Raises:
        CodecError: For infinities and NaN.
    """
    if not bool(torch.isfinite(values).all()):
        raise CodecError(f"{name} is not finite in the base's {str(values.dtype).removeprefix('torch.')}")


MAX_KEPT_BYTES = 64 << 20
"""Maximum size in bytes of cached sums."""


class MergedWeights:
    """Sums of the base and the delta, for forward passes in which all rows belong to one variant.

    Args:
        bulk_rows: Minimum number of rows for which a sum that is not cached is computed.
    """

    def __init__(self, bulk_rows: int) -> None:
        self._bulk_rows = bulk_rows
        self._kept: dict[str, Tensor] = {}
        self._bytes = 0

    def product(self, name: str, module: nn.Module, delta: VariantWeight | None, x: Tensor) -> Tensor | None:
        """Return ``x @ (weight + delta).T + bias``, or None if base and delta must be multiplied separately.

        In bfloat16 they must be, since a sum would lose a small delta.
        """
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        if weight.dtype != torch.float32 or not isinstance(delta, PackedWeight | DenseWeight):
            return None
        base = weight if isinstance(module, nn.Linear) else weight.T
        if name not in self._kept and self._bytes + weight.nbytes <= MAX_KEPT_BYTES:
            self._kept[name] = base + _decoded(delta, 0, len(base))
            self._bytes += weight.nbytes
        if name in self._kept:
            return functional.linear(x, self._kept[name], bias)
        if x.numel() < self._bulk_rows * x.shape[-1] or base is not weight:
            return None
        blocks = delta.held.blocks() if isinstance(delta, PackedWeight) else [(0, len(base))]
        parts = [
            functional.linear(x, base[start:stop] + _decoded(delta, start, stop)) for start, stop in blocks
        ]
        joined = torch.cat(parts, dim=-1)
        return joined if bias is None else joined.add_(bias)


def _decoded(delta: PackedWeight | DenseWeight, start: int, stop: int) -> Tensor:
    return (
        delta.held.decode_block(start, stop) if isinstance(delta, PackedWeight) else delta.matrix[start:stop]
    )
