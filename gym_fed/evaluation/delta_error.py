"""Error of an encoded delta by layer: of the weights, and of the layers' outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gym_fed.data.encoding import encode_rows
from gym_fed.delta.base import model_tensors
from gym_fed.delta.file import DeltaFile


@dataclass(frozen=True)
class LayerError:
    """The error of one tensor of a delta.

    Attributes:
        name: The tensor.
        codec: The tensor's codec in the file; None if the file omits the tensor.
        bits_per_weight: Payload bits for each weight of the tensor.
        weight_error: ``|decoded - delta| / |delta|`` (Frobenius); NaN where the tensor did not change.
        output_error: The same of what the delta adds to the layer's output, ``|(decoded - delta) x| / |delta x|``
            over all tokens of the text; None where the tensor is not a linear or embedding weight, or without text.
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
    """Compare ``delta`` with ``tuned - base``, tensor by tensor in order of name.

    Layer inputs are those of the tuned model on ``rows``. Without rows one decoded delta is in memory at a time, with
    rows all of them.

    Raises:
        GymError: ``DATA_INVALID`` when the rows hold nothing to encode.
    """
    true = {name: t.to("cpu", torch.float32) - base[name].float() for name, t in model_tensors(tuned).items()}
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
            found = tuple(
                float(apply(arguments[0], part[name].to(arguments[0].device)).double().square().sum())
                for part in (wrong, true)
            )
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + found[0], before[1] + found[1])

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
