"""Settings of a delta's encoding: codecs of matrices, embeddings, head, norms and factors, and a byte budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from gym_quant.registry import CODECS
from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf

if TYPE_CHECKING:
    from gym_quant.codec import Codec

ROW = "-row"
"""Suffix of a codec's name: one scale per row instead of ``group_size``."""

SAME_ROW = f"same{ROW}"
"""Codec of embeddings and heads: the same as other matrices, with one scale per row."""


class _Part(MemberOf):
    """A codec, optionally with the suffix ``-row``."""

    def words(self) -> tuple[str, ...]:
        return (*super().words(), *(f"{name}{ROW}" for name in self.kind.names()))

    def _validate_name(self, name: str) -> str:
        super()._validate_name(codec_of(name))
        return name


MatrixCodec = Annotated[str, MemberOf(CODECS, ("auto", "as-merged"))]
PartCodec = Annotated[str, _Part(CODECS, ("same", SAME_ROW))]
MenuCodec = Annotated[str, _Part(CODECS)]
SmallCodec = Annotated[str, MemberOf(CODECS)]
FactorCodec = Annotated[str, MemberOf(CODECS, ("auto", "bfloat16", "float32"))]

_SPARSE_DECAY = 0.95
_PLAIN_FACTORS = ("bfloat16", "float32")


def codec_of(word: str) -> str:
    """Return the codec in a value such as ``int4-row``."""
    return word.removesuffix(ROW)


class CodecPolicy(StrictModel):
    """The codecs of a contributor's update, or of a soup."""

    codec: MatrixCodec = "bitdelta"
    """Codec of matrices, built-in or of an installed package: sign bits, the values themselves, factors of a truncated
    SVD, 8 to 1 bits per weight on a grid, or, for soups, ``lattice``: multiples of a power of two that add up as
    integers, for every tensor. ``as-merged`` is only for soups. It stores stacked LoRA factors where the merge yields
    some and they take fewer bytes than the values; the only loss is their dtype (``factors``). Other tensors are
    values. ``auto`` is sign bits, or, with ``max_bits_per_weight``, the codec that preserves the most, per tensor."""

    embeddings: PartCodec = SAME_ROW
    """Codec of embedding tables (found by their names: ``embed_tokens``, ``wte``, ...; a tied head is one of them).
    ``same``: like other matrices. ``same-row``: like other matrices, but scales are per row (token), unless
    ``group_size`` or ``max_bits_per_weight`` is set. The suffix ``-row``, as in ``bitdelta-row``, always gives one
    scale per row."""

    head: PartCodec = SAME_ROW
    """Codec of an output head with its own weights (``lm_head``, ``embed_out``); values as for ``embeddings``."""

    small_tensors: SmallCodec = "dense"
    """Codec of norms, biases, and other tensors with one dimension or at most ``small_max_elements`` elements."""

    small_max_elements: Annotated[int, Field(ge=0)] = 256
    """Maximum number of elements of a small matrix."""

    symmetric: bool = True
    """Levels of the grids int8 to binary: symmetric about zero, or with an offset (ternary: a scale per sign)."""

    group_size: Annotated[int, Field(ge=8)] | Literal["tensor", "row", "auto"] | None = None
    """Columns that share a scale; ``row`` for one scale per row, ``tensor`` for one per tensor. Default: ``tensor`` for
    bitdelta and ``row`` for the grids. ``auto`` uses row scales for a bitdelta tensor if these bytes keep more of
    its energy than its sign bits do (mostly embeddings, whose rows change by very different amounts), and always for
    grids."""

    scale_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the scales of bitdelta and of the grids."""

    scale_gain: Annotated[float, Field(ge=1, lt=2)] = 1.0
    """bitdelta: factor on the scales. 1.0 (the mean magnitude) minimises the error of one update, but shrinks it.
    In a mean of many updates, sign errors average out but shrinkage does not (Vargaftik et al. 2021, "DRIVE", sec. 4),
    so 1.2 to 1.5 are more accurate, and residuals are smaller. Below 2, a residual is always shorter than the delta to
    send."""

    dense_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of dense tensors."""

    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of factors; required by ``lora`` and other codecs of factors."""

    factors: FactorCodec = "bfloat16"
    """Encoding of factors, of codec ``lora`` and of LoRA fine-tunes: unquantised (``float32`` for a product
    accurate to 1e-6), in one of the grids, or ``auto``: per singular component of the product, the grid that preserves
    the most within ``factor_bits``."""

    factor_bits: Annotated[float, Field(gt=0)] | None = None
    """factors auto: bits per element of the trained factors, including scales but not the header. Default: 1.75,
    which makes whole files about 8 times smaller than float16 factors."""

    factor_group_size: Annotated[int, Field(ge=8)] | None = None
    """Values of a quantised factor that share a scale; by default 128."""

    max_bits_per_weight: Annotated[float, Field(gt=0)] | None = None
    """Maximum bits of the file per weight of the base, header included. Tensors that do
    not fit stay in the error-feedback residual, so this needs ``error_feedback``."""

    distill_steps: Annotated[int, Field(ge=0, le=10_000)] = 0
    """For full deltas: steps that train the scales, on the contributor's own data, to match the tuned model's outputs
    (BitDelta's scale distillation); 0 disables it."""

    distill_bits: bool = False
    """Train the sign bits of bitdelta as well as the scales; needs ``distill_steps``."""

    error_feedback: bool = True
    """Add the encoding error of one round to the next round's delta."""

    feedback_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of the encoding errors of earlier rounds, with ``error_feedback``; below 1, old errors fade. Default:
    0.95 if ``codec`` is ``sparse_sign``, which sends each weight only once in many rounds; otherwise 1."""

    _rank_is_needed: ClassVar[bool] = True

    @property
    def gives_rows(self) -> bool:
        """True if ``same-row`` gives more scales than ``same``, as no other key sets their number or the bytes."""
        return self.group_size is None and self.max_bits_per_weight is None

    @property
    def quantises_factors(self) -> bool:
        """True if encoding LoRA factors loses enough for error feedback to matter."""
        return self.factors not in _PLAIN_FACTORS

    @property
    def adds_up(self) -> bool:
        """True if soups of this policy can be added as integers; imports the codec unless it is the default."""
        return self._differs("codec") and self.codec in CODECS and CODECS.type_of(self.codec).adds_up

    @property
    def sparse_codecs(self) -> list[str]:
        """The codecs in use that leave out most weights; imports those that are not the default."""
        differs = self._differs("codec", "embeddings", "head", "small_tensors")
        return [codec.name for codec in self._used() if codec.sparse] if differs else []

    @property
    def decay(self) -> float:
        """The decay factor: ``feedback_decay``, or 1 if unset."""
        return 1.0 if self.feedback_decay is None else self.feedback_decay

    def _used(self) -> list[type[Codec]]:
        """Return the codecs that a full delta may be written with; imports them."""
        words = {self.codec, self.small_tensors, self.embeddings, self.head}
        return [CODECS.type_of(codec_of(word)) for word in sorted(words) if codec_of(word) in CODECS]

    def _belongs(self, key: str, fact: str, auto: bool = True) -> None:
        """Refuse a key that no codec of this policy reads; ``auto`` is True if the codec ``auto`` reads it."""
        used = self._used()
        if (auto and self.codec == "auto") or any(getattr(codec, fact) for codec in used):
            return
        names = sorted({codec.name for codec in used})
        raise ValueError(f"{key}, which {self.codec!r} does not have (in use: {', '.join(names) or 'none'})")

    def _differs(self, *keys: str) -> bool:
        """Return True if one of the keys differs from its default; the codec is looked up only then."""
        fields = type(self).model_fields
        return any(getattr(self, key) != fields[key].default for key in keys)

    @model_validator(mode="before")
    @classmethod
    def _default_error_feedback(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("codec") == "as-merged":
            return {"error_feedback": False, **given}
        return given

    @model_validator(mode="after")
    def _validate_combinations(self) -> CodecPolicy:
        if self.codec == "as-merged" and self.error_feedback:
            raise ValueError(
                "codec 'as-merged' loses only rounding, and a residual is not a product of factors; "
                "set error_feedback: false"
            )
        if self._differs("feedback_decay") and not self.error_feedback:
            raise ValueError("feedback_decay needs error_feedback: true; remove it")
        if self.error_feedback and self.feedback_decay is None and self.codec in self.sparse_codecs:
            # Set it explicitly, so that records keep the value if the default changes.
            object.__setattr__(self, "feedback_decay", _SPARSE_DECAY)
            self.model_fields_set.add("feedback_decay")
        if self.max_bits_per_weight is not None and not self.error_feedback and self.codec != "auto":
            raise ValueError(
                "max_bits_per_weight leaves tensors out of the file, which loses them permanently without "
                "error_feedback; set error_feedback: true or codec: auto, or remove the budget"
            )
        if self._differs("small_tensors", "embeddings", "head") and self.adds_up:
            raise ValueError(
                f"codec {self.codec!r} encodes every tensor: remove small_tensors, embeddings and head"
            )
        if self._differs("group_size", "scale_dtype"):
            self._belongs("group_size and scale_dtype apply only to codecs with scales", "has_scales")
        if self._differs("symmetric"):
            self._belongs("symmetric applies only to codecs with offsets (the grids)", "has_offsets")
        if self._differs("lora_rank"):
            self._belongs("lora_rank applies only to codecs of factors", "low_rank", auto=False)
        elif self._rank_is_needed:
            for key in ("codec", "embeddings", "head"):
                word = codec_of(getattr(self, key))
                if self._differs(key) and word in CODECS and CODECS.type_of(word).low_rank:
                    raise ValueError(f"lora_rank is required for codec {word!r}")
        if self._differs("small_tensors") and not CODECS.type_of(self.small_tensors).for_small:
            raise ValueError(f"small_tensors: codec {self.small_tensors!r} is not for small tensors")
        for word in (self.embeddings, self.head):
            if word != SAME_ROW and word.endswith(ROW) and not CODECS.type_of(codec_of(word)).has_scales:
                raise ValueError(
                    f"{word!r}: codec {codec_of(word)!r} has no scales, so it cannot have one per row"
                )
        if self.factors not in (*_PLAIN_FACTORS, "auto"):
            from gym_quant.factor_encoding import is_factor_codec

            if not is_factor_codec(self.factors):
                raise ValueError(f"factors: codec {self.factors!r} is not for factors")
        if self.factor_bits is not None and self.factors != "auto":
            raise ValueError(f"factor_bits applies to factors 'auto', not to {self.factors!r}")
        if self._differs("distill_steps"):
            self._belongs("distill_steps trains scales", "has_scales")
        if self._differs("scale_gain"):
            self._belongs("scale_gain applies only to codecs whose scales are mean magnitudes", "takes_gain")
        if self.scale_gain != 1.0 and self.distill_steps:
            raise ValueError("distill_steps trains the scales that scale_gain sets; use one of them")
        if self.distill_bits and not self.distill_steps:
            raise ValueError("distill_bits does nothing without distill_steps; set distill_steps above 0")
        if self.factor_group_size is not None and not self.quantises_factors:
            raise ValueError(f"factor_group_size applies to quantised factors, not to {self.factors}")
        return self
