"""Packs weights as AWQ and GPTQ do, by whole numbers of any size: written for the tests, and nothing of the readers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WORD = 1 << 32


def signed(word: int) -> int:
    """A word of 32 bits as int32 holds it."""
    return word - WORD if word >= WORD // 2 else word


def stream(values: list[int], bits: int) -> list[int]:
    """Words of one long number, in which each value follows the one before, the first in the lowest bits."""
    number = 0
    for place, value in enumerate(values):
        number |= value << (place * bits)
    return [signed(number >> (32 * word) & (WORD - 1)) for word in range(len(values) * bits // 32)]


def drawn(
    inputs: int, outputs: int, bits: int, groups: int, seed: int = 0, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values ``[inputs, outputs]``, zero points and scales ``[groups, outputs]``."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (inputs, outputs), generator=random)
    zeros = torch.randint(0, 2**bits, (groups, outputs), generator=random)
    scales = (torch.rand(groups, outputs, generator=random) * 0.02 + 0.001).to(dtype)
    return values, zeros, scales


def plain(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: list[int]) -> torch.Tensor:
    """``[outputs, inputs]`` that the packed weights stand for."""
    rows = [(values[i] - zeros[g]).double() * scales[g].double() for i, g in enumerate(group)]
    return torch.stack(rows).T.to(scales.dtype)


def gptq(
    values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, *, less: int = 1
) -> dict[str, Any]:
    """Tensors of a layer; ``less`` is what a stored zero point lacks."""
    columns = [stream(values[:, o].tolist(), bits) for o in range(values.shape[1])]
    stored = (zeros - less) % 2**bits
    rows = [stream(stored[g].tolist(), bits) for g in range(zeros.shape[0])]
    return {
        "qweight": torch.tensor(columns, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor(rows, dtype=torch.int32),
        "scales": scales,
    }


def awq(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
    """Tensors of a layer of 4 bits in the layout gemm."""

    def words(row: list[int]) -> list[int]:
        eights = [row[start : start + 8] for start in range(0, len(row), 8)]
        return [
            word
            for one in eights
            for word in stream([one[0], one[2], one[4], one[6], one[1], one[3], one[5], one[7]], 4)
        ]

    return {
        "qweight": torch.tensor([words(row) for row in values.tolist()], dtype=torch.int32),
        "qzeros": torch.tensor([words(row) for row in zeros.tolist()], dtype=torch.int32),
        "scales": scales,
    }


def rounded(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[outputs, inputs]`` as values, zero points and scales of groups of inputs, in 4 bits."""
    groups = weight.float().T.reshape(-1, group, weight.shape[0])
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    values = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return values.reshape(weight.T.shape).long(), zeros.long(), scales


def packed_layers(
    tensors: Mapping[str, torch.Tensor], method: str, group: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model's tensors with every ``*_proj.weight`` packed, and the weights that those stand for."""
    found: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = value
            continue
        values, zeros, scales = rounded(value, group)
        layer = awq(values, zeros, scales) if method == "awq" else gptq(values, zeros, scales, 4)
        found |= {f"{name.removesuffix('.weight')}.{part}": one for part, one in layer.items()}
        wanted[name] = plain(values, zeros, scales, [place // group for place in range(values.shape[0])])
    return found, wanted


def pack_layers(folder: Path, method: str, group: int) -> None:
    """Pack the layers of a model folder of one file."""
    file = folder / "model.safetensors"
    tensors, _ = packed_layers(load_file(file), method, group)
    save_file({name: one.contiguous() for name, one in tensors.items()}, file, metadata={"format": "pt"})
