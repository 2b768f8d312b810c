"""Statistics of deltas and merges: Fisher diagonals, input moments, losses of merged models, errors by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from gym_quant import CodecError
from gym_quant.calibration import collect_input_moments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.data.encoding import IGNORED, encode_rows
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.vocabulary import split_vocabulary
from gym_fed.evaluation.loss import heldout_loss
from gym_fed.soup.model_merging import combined

Kind: TypeAlias = Literal["fisher", "moments"]
KINDS: Mapping[Kind, str] = {"fisher": "fisher diagonals", "moments": "input second moments [cols, cols]"}
"""The kinds of ``MergeMethod.statistics``."""


def fisher_diagonals(
    model: nn.Module, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_length: int = 256
) -> dict[str, Tensor]:
    """Compute the diagonal of the empirical Fisher information: the mean squared gradient of a row's log-likelihood.

    Matena & Raffel 2022, eq. 3, with each row's own tokens instead of tokens sampled from the model. A row's
    log-likelihood is the sum over the tokens that ``encode_rows`` labels.

    Returns:
        Float32 CPU tensors by parameter name, in the shape of the parameter.

    Raises:
        GymError: ``DATA_INVALID`` if the rows have nothing to predict, or a gradient is not finite.
    """
    encoded = encode_rows(tokenizer, rows, max_length=max_length)
    device = next(model.parameters()).device
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    was_training = model.training
    model.eval().requires_grad_(True)
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    try:
        for row in encoded:
            model.zero_grad(set_to_none=True)
            ids, labels = (torch.tensor([row[key]], device=device) for key in ("input_ids", "labels"))
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] += parameter.grad.detach().cpu().double().square()
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    diagonals = {name: (total / len(encoded)).float() for name, total in sums.items()}
    for name, diagonal in diagonals.items():
        if not bool(torch.isfinite(diagonal).all()):
            raise GymError(ErrorCode.DATA_INVALID, f"tensor {name!r}: a gradient is not finite on this data")
    return diagonals


def input_moments(
    model: nn.Module, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_length: int = 256
) -> dict[str, Tensor]:
    """Compute second moments of the inputs of linear layers, averaged over tokens (RegMean's ``X^T X / N``).

    Returns:
        ``[in, in]`` float32 CPU tensors by the name of the layer's weight. A head that is tied to the embeddings is
        omitted, since the tied tensor has the embeddings' name and is merged like them.

    Raises:
        GymError: ``DATA_INVALID`` if the rows have nothing to encode, and for layers that no row reaches.
    """
    encoded = encode_rows(tokenizer, rows, max_length=max_length)
    try:
        sums_by_layer = collect_input_moments(
            model, [torch.tensor([row["input_ids"]]) for row in encoded], samples=len(encoded), full=True
        )
    except CodecError as error:
        raise GymError(ErrorCode.DATA_INVALID, str(error), "use different or more text") from error
    own = {name for name, _ in model.named_parameters()}
    return {name: moments for name, moments in sums_by_layer.items() if name in own}


def save_statistics(path: Path, kind: Kind, statistics: Mapping[str, Tensor]) -> None:
    """Write statistics to a safetensors file that names their kind."""
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in statistics.items()}
    write_atomically(path, save(tensors, metadata={"gym_statistics": kind}))


class StatisticsFile(Mapping[str, Tensor]):
    """Statistics in a file, by tensor name; each is read on demand."""

    def __init__(self, path: Path, kind: Kind) -> None:
        """Open a file of ``save_statistics``.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` for another kind of file.
        """
        from safetensors import SafetensorError, safe_open

        self._path = path
        self._remedy = remedy = f"create it: gym soup statistics --kind {kind}"
        if not path.is_file():
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no statistics at {path}", remedy)
        reader: Callable[..., Any] = safe_open
        try:
            self._file = reader(path, framework="pt")
        except SafetensorError as error:
            raise GymError(ErrorCode.DATA_INVALID, f"{path}: {error}", remedy) from error
        held = (self._file.metadata() or {}).get("gym_statistics", "")
        if held != kind:
            words = KINDS.get(cast(Kind, held), "no statistics for merging")
            raise GymError(
                ErrorCode.DATA_INVALID, f"{path} contains {words}, but {KINDS[kind]} are required", remedy
            )
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (TypeError, RuntimeError) as error:  # torch refuses sizes beyond 64 bits
            reason = f"{self._path}: {name[:200]} cannot be read: {str(error).partition(chr(10))[0]}"
            raise GymError(ErrorCode.DATA_INVALID, reason, self._remedy) from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def kind_of(statistics: str) -> Kind:
    """Return the kind that a merge method names (``MergeMethod.statistics``).

    Raises:
        GymError: ``USAGE`` if there is no such kind.
    """
    for kind, words in KINDS.items():
        if words == statistics:
            return kind
    raise GymError(ErrorCode.USAGE, f"cannot measure {statistics!r} for a model")


class SoupLoss:
    """The held-out loss of ``base + sum_i c_i delta_i``.

    Args:
        model: The base; it is changed during a call and restored bit for bit afterwards.
        updates: Open deltas of that base.
        rows: Rows, as for ``heldout_loss``.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, updates: Sequence[DeltaFile], rows: Sequence[dict[str, Any]]
    ) -> None:
        self._model, self._tokenizer, self._updates, self._rows = model, tokenizer, updates, rows

    def __call__(self, coefficients: Tensor) -> float:
        """Return the mean nats per token for float64 ``coefficients`` ``[n]``; inf or NaN for a broken model."""
        with _applied(self._model, self._updates, coefficients):
            return heldout_loss(self._model, self._tokenizer, self._rows)

    def of_base(self) -> float:
        """Return the base's loss."""
        return heldout_loss(self._model, self._tokenizer, self._rows)


@contextmanager
def _applied(model: nn.Module, updates: Sequence[DeltaFile], coefficients: Tensor) -> Iterator[None]:
    tensors = model_tensors(model)
    inside = [i for i, coefficient in enumerate(coefficients.tolist()) if coefficient]
    chosen, own = [updates[i] for i in inside], coefficients[inside]
    originals: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name in sorted({name for update in chosen for name in update.names}):
                target = tensors[name]
                originals[name] = target.clone()
                change = combined(chosen, own, name, tuple(target.shape)).to(target.device)
                target.copy_(target.float() + change)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in originals.items():
                tensors[name].copy_(tensor)


@dataclass(frozen=True)
class LayerError:
    """The error of one tensor of a delta.

    Attributes:
        name: Name of the tensor.
        codec: The tensor's codec in the file; None if the file omits the tensor.
        bits_per_weight: Payload bits for each weight of the tensor.
        weight_error: ``|decoded - delta| / |delta|`` (Frobenius); NaN if the tensor did not change.
        output_error: Relative error of the delta's contribution to the layer's output, ``|(decoded - delta) x| / |delta
            x|`` over all tokens of the text; None without text, or if the tensor is not a linear or embedding weight.
    """

    name: str
    codec: str | None
    bits_per_weight: float
    weight_error: float
    output_error: float | None


@torch.inference_mode()
def layer_errors(
    tuned: nn.Module,
    base: Mapping[str, Tensor],
    delta: DeltaFile,
    tokenizer: Any = None,
    rows: Sequence[dict[str, Any]] = (),
    *,
    max_length: int = 256,
) -> list[LayerError]:
    """Compare ``delta`` with ``tuned - base``, tensor by tensor in order of name; rows of added tokens are exact.

    Layer inputs are those of the tuned model on ``rows``. Without rows, one decoded tensor of the delta is in memory at
    a time; with rows, all of them.

    Raises:
        GymError: ``DATA_INVALID`` if the rows have nothing to encode.
    """
    split, _ = split_vocabulary(tuned, base, (tokenizer, None))
    if delta.added_rows is not None:  # the file has the base's own values there, as no change
        first = delta.added_rows.first
        for name in delta.added_rows.names:
            split[name] = torch.cat([split[name][:first], base[name][first:].to(split[name])])
    true = {name: t.to("cpu", torch.float32) - base[name].float() for name, t in split.items()}
    wrong = {
        name: (delta.decode(name) if name in delta else torch.zeros_like(t)) - t for name, t in true.items()
    }
    outputs: dict[str, tuple[float, float]] = {}
    if rows:
        with _measured(tuned, true, wrong) as outputs:
            for row in encode_rows(tokenizer, rows, max_length=max_length):
                tuned(input_ids=torch.tensor([row["input_ids"]]), use_cache=False)
    return [
        LayerError(
            name,
            delta.record(name).codec if name in delta else None,
            8.0 * delta.payload_bytes(name) / t.numel() if name in delta else 0.0,
            _ratio(float(wrong[name].norm()), float(t.norm())),
            _ratio(*(square**0.5 for square in outputs[name])) if name in outputs else None,
        )
        for name, t in sorted(true.items())
    ]


@contextmanager
def _measured(
    model: nn.Module, true: Mapping[str, Tensor], wrong: Mapping[str, Tensor]
) -> Iterator[dict[str, tuple[float, float]]]:
    """Accumulate squared norms of output errors and true outputs by tensor, over the forward passes in the block."""
    sums: dict[str, tuple[float, float]] = {}
    was_training = model.training
    model.eval()

    def hook(name: str) -> Any:
        def add(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            apply = nn.functional.embedding if isinstance(module, nn.Embedding) else nn.functional.linear
            squares = tuple(
                float(apply(arguments[0], part[name].to(arguments[0].device)).double().square().sum())
                for part in (wrong, true)
            )
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + squares[0], before[1] + squares[1])

        return add

    handles = [
        module.register_forward_hook(hook(f"{path}.weight"))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and f"{path}.weight" in true
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)


def _ratio(wrong: float, true: float) -> float:
    return wrong / true if true else float("nan")
