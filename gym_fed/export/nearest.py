"""LoRA factors of a delta, its own or the nearest of a given rank, for servers that apply adapters per request.

The nearest of rank r in the Frobenius norm are the r largest singular components (Eckart and Young 1936). They depend
on the delta only, not on rows or training. They are exact up to a smaller dimension of 768. Above that size they are
computed by subspace iteration, with more rounds than in a codec, since it converges slowly on the flat spectrum of sign
matrices. It misses at most 0.7% of the squared norm that a rank can keep for random signs of 1024 x 1024 (rank 8; 32:
0.35%).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from gym_quant.codec import sum_of_squares
from gym_quant.codecs.lora import Lora
from gym_quant.factors import LARGEST_EXACT, Components, components_of_matrix, components_of_product
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.factors import beyond_factors, is_plain_lora, lora_factors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.low_rank import Factors
from gym_fed.export.formats.base import Options
from gym_fed.export.process import Report
from gym_fed.export.source import Source

_DEFAULT_RANK = 32
_NAMES_SHOWN = 3
_ROUNDS = 4
"""Rounds of subspace iteration; each starts from the components of the previous round."""


@dataclass(frozen=True)
class LoraFactors:
    """The factors of a change of weights.

    Attributes:
        factors: A ``[rank, in]`` and B ``[out, rank]`` in float32, by name of the weight; all with the same rank and
            scaling.
        rank: The number of columns of every B.
        scaling: The factor of every product.
        norm_kept: The share of the delta's squared norm that the products keep: 1 minus the share of their error.
        nearest: Names of matrices that are approximated.
        left_out: Names of changed tensors that LoRA cannot represent, with their shares of the squared norm.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    scaling: float
    norm_kept: float
    nearest: tuple[str, ...]
    left_out: Mapping[str, float]


def factors_of(source: Source, rank: int | None, report: Report) -> LoraFactors:
    """Return the factors of a source's delta or of its own adapter; computed once.

    Args:
        source: See ``open_source``.
        rank: Maximum components of a delta's matrix; None: 32, or all of a matrix that is stored as factors.
        report: Called with the number of finished matrices.

    Raises:
        GymError: ``USAGE`` for a source without a change that LoRA can represent; ``MODEL_INVALID`` as
            ``lora_factors``.
    """
    key = f"lora.{rank}"
    if key not in source.cache:
        source.cache[key] = _factors(source, rank, report)
    factors: LoraFactors = source.cache[key]
    return factors


def _factors(source: Source, rank: int | None, report: Report) -> LoraFactors:
    if source.delta is None:
        if not is_plain_lora(source.model):
            others = sorted(beyond_factors(source.model)) if source.adapted else []
            also = f": it also trained {', '.join(others[:_NAMES_SHOWN])}" if others else ""
            raise GymError(
                ErrorCode.USAGE,
                f"{source.name}: its adapter has more than two LoRA factors per matrix{also}",
                "export it as huggingface or gguf, merged",
            )
        return _of_one_rank(lora_factors(source.model), 1.0, (), {})
    modules = source.model.named_modules()
    linear = {f"{name}.weight" for name, module in modules if isinstance(module, torch.nn.Linear)}
    by_name: dict[str, Factors] = {}
    nearest: list[str] = []
    left_out: dict[str, float] = {}
    total = lost = 0.0
    with DeltaFile.open(source.delta) as delta:
        for number, name in enumerate(delta.names):
            report("computing LoRA factors", number, len(delta.names))
            square = delta.tensor_norm(name) ** 2
            total += square
            if name not in linear:
                left_out[name] = square
                continue
            by_name[name], off = _matrix(delta, name, rank)
            lost += off
            if off > 0.0:
                nearest.append(name)
    if not by_name:
        raise GymError(
            ErrorCode.USAGE,
            f"{source.name}: LoRA cannot represent any of its {counted(len(left_out), 'changed tensor')}",
            "export it as huggingface or gguf, merged",
        )
    lost += math.fsum(left_out.values())
    shares = {name: square / (total or 1.0) for name, square in left_out.items()}
    return _of_one_rank(by_name, 1.0 - lost / (total or 1.0), tuple(nearest), shares)


def _matrix(delta: DeltaFile, name: str, rank: int | None) -> tuple[Factors, float]:
    """Return the factors of a matrix, and the squared norm of their error."""
    record = delta.record(name)
    if record.codec == Lora.name:
        codec = Lora()
        a, b = (factor.float() for factor in codec.factors(delta.payload(name), record.shape, record.params))
        scaling = codec.scaling(record.params)
        if rank is None or len(a) <= rank:
            return (a.clone(), b.clone(), scaling), 0.0
        components = components_of_product(b * scaling, a)
        first = components.first(rank)
        off = float(components.values[rank:].square().sum())
        return (first.right.float(), first.left.float(), 1.0), off
    dense = delta.decode(name)
    components = largest_components(dense, _DEFAULT_RANK if rank is None else rank)
    off = max(0.0, sum_of_squares(dense) - float(components.values.square().sum()))
    return (components.right.float(), components.left.float(), 1.0), off


def largest_components(matrix: Tensor, rank: int) -> Components:
    """Return the ``rank`` largest singular components of ``[rows, cols]``.

    The eigenvectors of the smaller Gram matrix span them; for a large matrix subspace iteration finds the span.
    """
    if min(matrix.shape) > LARGEST_EXACT:
        components = components_of_matrix(matrix, rank)
        for _ in range(_ROUNDS - 1):
            components = components_of_matrix(matrix, rank, components.left)
        return components
    wide = matrix.double()
    small = wide if wide.shape[0] <= wide.shape[1] else wide.T
    basis = torch.linalg.eigh(small @ small.T).eigenvectors.flip(1)[:, :rank]
    products = basis.T @ small
    values = products.norm(dim=1)
    roots = values.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    left, right = basis * roots, products / roots[:, None]
    return Components(left, right, values) if small is wide else Components(right.T, left.T, values)


def _of_one_rank(
    factors: Mapping[str, Factors], norm_kept: float, nearest: tuple[str, ...], left_out: Mapping[str, float]
) -> LoraFactors:
    """Pad smaller ranks with zeros and move differing scalings into B; not every server supports mixed ranks."""
    rank = max(len(a) for a, _, _ in factors.values())
    scalings = {scaling for _, _, scaling in factors.values()}
    common = scalings.pop() if len(scalings) == 1 else 1.0
    common = common if common > 0.0 else 1.0
    padded = {}
    for name, (a, b, scaling) in factors.items():
        wide_a, wide_b = a.new_zeros(rank, a.shape[1]).float(), b.new_zeros(b.shape[0], rank).float()
        wide_a[: len(a)] = a
        wide_b[:, : len(a)] = b * (scaling / common)
        padded[name] = (wide_a, wide_b)
    return LoraFactors(padded, rank, common, norm_kept, nearest, left_out)


def lora_model(source: Source, rank: int | None, report: Report) -> Any:
    """Return the base with the factors as a ``peft.PeftModel`` in float32.

    Raises:
        GymError: See ``factors_of``.
    """
    from peft import LoraConfig, get_peft_model

    lora = factors_of(source, rank, report)
    base = base_model(source)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=_as_int(lora.scaling * lora.rank),
        target_modules=_targets(base, [name.removesuffix(".weight") for name in lora.factors]),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(base, settings)
    with torch.no_grad():
        for name, (a, b) in lora.factors.items():
            layer: Any = wrapped.get_base_model().get_submodule(name.removesuffix(".weight"))
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)
    return wrapped.eval()


def base_model(source: Source) -> Any:
    """Load the base again, with the adapters below the source's own adapter or delta merged in."""
    from gym_fed.base.modeling.adapters import merge_adapters
    from gym_fed.base.models import quiet_loading

    assert source.read_base is not None  # a source with an adapter or a delta has one
    with quiet_loading():
        return merge_adapters(source.read_base(), source.below)


def _as_int(value: float) -> Any:
    """Return alpha as an int if possible, as servers read it; PEFT accepts a float."""
    return int(value) if value.is_integer() else value


def _targets(model: Any, names: list[str]) -> list[str]:
    """Return the modules' last names, such as ``q_proj``, if they match no other modules; otherwise full names."""
    ends = {name.rpartition(".")[2] for name in names}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == set(names) else names)


_MIN_KEPT_GAIN = 0.8
"""Share of the gain below which a note warns."""


@dataclass(frozen=True)
class KeptGain:
    """Losses on held-out rows, in nats per token.

    A variant's gain is its base's loss minus its own. The share that its LoRA keeps is the LoRA's gain divided by the
    variant's: 1 is all, 0 is none, and below 0 the LoRA is worse than the base.

    Attributes:
        rows: The number of rows.
        base: The loss of the base.
        variant: The loss of the base with the exact delta.
        lora: The loss of the base with the factors.
    """

    rows: int
    base: float
    variant: float
    lora: float

    @property
    def kept(self) -> float | None:
        """The share of the gain that the LoRA keeps; None if the variant gains nothing on these rows."""
        gain = self.base - self.variant
        return (self.base - self.lora) / gain if gain > 0.0 and math.isfinite(gain) else None


def kept_gain(source: Source, rank: int | None, rows: Sequence[dict[str, Any]], options: Options) -> KeptGain:
    """Measure the losses of base, variant and LoRA on the same rows.

    Args:
        source: A source with a delta.
        rank: As for ``factors_of``.
        rows: As for ``heldout_loss``; the variant must not have been trained on them.
        options: The options of the export; ``report`` receives the progress.

    Raises:
        GymError: ``DATA_INVALID`` if the rows contain nothing to predict.
    """
    from gym_fed.evaluation.loss import heldout_loss

    lora = lora_model(source, rank, options.report)

    def loss(number: int, stage: str, model: Any) -> float:
        options.report(f"measuring the loss of the {stage}", number, 3)
        return heldout_loss(model, source.tokenizer, rows)

    with lora.disable_adapter():
        base = loss(1, "base", lora)
    return KeptGain(len(rows), base, loss(2, "variant", source.model), loss(3, "LoRA", lora))


def require_delta_options(source: Source, options: Options) -> None:
    """Refuse options of a delta's LoRA for an adapter, whose factors are written unchanged.

    Raises:
        GymError: ``USAGE``.
    """
    if source.delta is None and (options.rank is not None or options.rows):
        option = "--data" if options.rank is None else "--rank"
        raise GymError(
            ErrorCode.USAGE,
            f"{option}: {source.name} has its own adapter",
            "omit the option, which applies only to a variant",
        )


def lora_facts(source: Source, options: Options) -> dict[str, Any]:
    """Return the entries of ``export.json`` about a delta's factors: ``lora``, and ``notes`` for the user."""
    factors = factors_of(source, options.rank, options.report)
    lora: dict[str, Any] = {
        "rank": factors.rank,
        "matrices": len(factors.factors),
        "exact": not factors.nearest,
        "squared_norm_kept": factors.norm_kept,
        "left_out": dict(factors.left_out),
    }
    notes = _left_out_notes(factors)
    if not options.rows:
        if factors.norm_kept < _MIN_KEPT_GAIN:
            notes.append(
                f"LoRA of rank {factors.rank} keeps {factors.norm_kept:.1%} of the delta's squared norm; its share "
                "of the gain is unknown: measure it with --data FILE of held-out rows"
            )
        return {"lora": lora, "notes": notes}
    gain = kept_gain(source, options.rank, options.rows, options)
    lora["gain"] = {**asdict(gain), "file": options.rows_name, "kept": gain.kept}
    losses = (
        f"loss {gain.base:.4g} of the base, {gain.variant:.4g} of the variant, {gain.lora:.4g} of the LoRA"
    )
    where = f"on {options.rows_name} ({counted(gain.rows, 'row')}: {losses})"
    if gain.kept is None:
        notes.append(f"the variant gains nothing {where}, so the kept share is undefined")
    elif gain.kept < _MIN_KEPT_GAIN:
        notes.append(f"LoRA of rank {factors.rank} keeps {gain.kept:.1%} of the gain {where}")
    return {"lora": lora, "notes": notes}


def _left_out_notes(factors: LoraFactors) -> list[str]:
    if not factors.left_out:
        return []
    names = sorted(factors.left_out, key=lambda name: -factors.left_out[name])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [
        f"LoRA cannot represent norms, biases and embeddings; left out: {counted(len(names), 'changed tensor')}, "
        f"{math.fsum(factors.left_out.values()):.1%} of the delta's squared norm: "
        f"{', '.join(names[:_NAMES_SHOWN])}{more}"
    ]
