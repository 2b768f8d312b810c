"""The report of a quantiser. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class QuantizedTensor:
    """One tensor of the base.

    Attributes:
        codec: Its codec; None if the tensor is not in the file.
        params: Parameters of the codec.
        why: The reason for the choice.
        payload_bytes: Bytes of the tensor in the file.
        energy: Squared L2 norm of its delta.
        bits_per_weight: Bits per weight of its payload.
        error: Relative L2 error of the decoded delta: 0 if exact or if the tensor did not change; 1 for a changed
            tensor that is not in the file.
        output_error: Relative error of the layer's output on the calibration text (by the mean squares of its inputs);
            None for tensors other than a linear layer's weight, or without calibration text.
    """

    name: str
    codec: str | None
    params: dict[str, int | float | str]
    why: str
    payload_bytes: int
    energy: float
    bits_per_weight: float
    error: float
    output_error: float | None


@dataclass(frozen=True)
class DistillReport:
    """The loss on calibration text before and after scale distillation, which never raises it.

    ``flipped`` is the share of trained bits that are no longer the sign of their delta.
    """

    loss: str
    steps: int
    num_scales: int
    flipped: float
    loss_before: float
    loss_after: float
    seconds: float


@dataclass(frozen=True)
class GainReport:
    """Losses on calibration text in nats per token: of the base, the fine-tune, and the base plus the file."""

    base: float
    tuned: float
    encoded: float

    @property
    def kept(self) -> float | None:
        """Return the fraction of the fine-tune's gain that the file retains; None if it gains nothing."""
        gain = self.base - self.tuned
        return (self.base - self.encoded) / gain if gain > 0.0 else None


@dataclass(frozen=True)
class LayerSafety:
    """One layer under ``safety_threshold``; ``cosine`` is None if aligned and unaligned are equal."""

    name: str
    cosine: float | None
    replaced: bool


@dataclass(frozen=True)
class QuantReport:
    """A quantised file.

    Attributes:
        path: The ``.gymdelta``.
        sha256: SHA-256 of its bytes in lower-case hex.
        size_bytes: Size of the whole file.
        norm: L2 norm of the decoded delta.
        bits_per_weight: Bits of the whole file, including its header, per weight of the base.
        distillation: Result of the distillation; None without one.
        gain: Losses on the calibration text; None without one.
        safety: ``applied``, or ``not applicable`` with the reason.
        layers: The result of the safety projection per layer.
        not_in_file: Changes other than weights, such as the chat template, which a delta cannot contain.
        vocabulary: The added tokens and rows, in words; empty without any.
    """

    path: Path
    sha256: str
    size_bytes: int
    norm: float
    bits_per_weight: float
    tensors: tuple[QuantizedTensor, ...] = field(repr=False)
    distillation: DistillReport | None
    safety: str
    layers: tuple[LayerSafety, ...] = field(default=(), repr=False)
    not_in_file: tuple[str, ...] = ()
    vocabulary: str = ""
    gain: GainReport | None = None

    @property
    def kept(self) -> float | None:
        """Return the fraction of the delta that the file retains (``gym_fed.delta.kept``); None if nothing changed."""
        whole = sum(tensor.energy for tensor in self.tensors)
        lost = sum(tensor.energy * tensor.error**2 for tensor in self.tensors)
        return max(0.0, 1.0 - (lost / whole) ** 0.5) if whole else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "file": str(self.path),
            "kept": self.kept,
            "gain_kept": None if self.gain is None else self.gain.kept,
        }
