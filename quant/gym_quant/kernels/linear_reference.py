"""The torch reference for packed base weights, bit-identical to native code for int8 and int4."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

BFLOAT16, INT8, INT4 = range(3)
"""The formats, by their numbers in native code."""

TILE = 32
"""Number of outputs of a tile."""
TOP, LEAST = 32512.0, 1e-30
"""The largest rounded activation; groups whose activations are below ``LEAST`` in magnitude count as zero."""
SHARES8 = (0.96, 0.97, 0.98, 0.99, 1.01, 1.02)
SHARES4 = (1.0, 0.94, 0.88, 0.82, 0.76)
FITS = 2
_BLOCK = 1 << 20
"""Number of weights that are unpacked at a time."""


def dtype_of(code: int) -> torch.dtype:
    """Return the tiles' dtype."""
    return torch.bfloat16 if code == BFLOAT16 else torch.uint8


def shape_of(code: int, rows: int, cols: int, group: int) -> tuple[int, ...]:
    """Return the tiles' shape for weights ``[rows, cols]``."""
    tiles, groups = -(-rows // TILE), -(-cols // group)
    if code == BFLOAT16:
        return tiles, groups, TILE, 2
    return tiles, groups, 2 * TILE + TILE * group if code == INT8 else 4 * TILE + TILE * group // 2


def group_of(code: int, tiles: Tensor) -> int:
    """Return the columns per scale of int8 or int4 tiles by their shape; 0 if it is invalid."""
    codes = tiles.shape[-1] - 2 * TILE * (1 if code == INT8 else 2) if tiles.ndim == 3 else 0
    group, left = divmod(codes * (1 if code == INT8 else 2), TILE)
    return 0 if left else group


def scales_are_finite(code: int, tiles: Tensor) -> bool:
    """Return True if all scales and minima of int8 or int4 tiles are finite."""
    width = 2 * TILE * (1 if code == INT8 else 2)
    step = max(1, _BLOCK // (tiles.shape[1] * tiles.shape[2]))
    for start in range(0, len(tiles), step):
        bits = tiles[start : start + step, :, :width].view(torch.int16)
        if bool((bits & 0x7C00 == 0x7C00).any()):
            return False
    return True


def pack(code: int, weight: Tensor, group: int, unit: float) -> Tensor:
    """Pack finite weights ``[rows, cols]`` into tiles."""
    rows, cols = weight.shape
    if code == BFLOAT16:
        padded = pad(weight.bfloat16(), (0, cols % 2, 0, -rows % TILE))
        return padded.view(-1, TILE, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
    # No negative zeros. [group, rows, groups]: each step handles all groups, each sum follows the columns' order.
    x = pad(weight.float() / unit + 0.0, (0, -cols % group)).view(rows, -1, group)
    there = (torch.arange(x.shape[1] * group) < cols).view(1, -1, group)
    x, there = x.permute(2, 0, 1).contiguous(), there.permute(2, 0, 1)
    fields, codes = _quantise8(x) if code == INT8 else _quantise4(x, there)
    codes = _tiled(torch.where(there, codes, 0.0).permute(1, 2, 0))
    codes = (codes + 128 if code == INT8 else codes).to(torch.uint8)
    tiles, groups = codes.shape[:2]
    if code == INT8:
        codes = codes.view(tiles, groups, TILE, -1, 4)
    else:
        codes = codes.view(tiles, groups, TILE, -1, 2, 4)
        codes = codes[..., 0, :] | codes[..., 1, :] << 4
    heads = [_tiled(field.half()).contiguous().view(torch.uint8) for field in fields]
    return torch.cat([*heads, codes.transpose(2, 3).reshape(tiles, groups, -1)], -1)


def multiply(code: int, tiles: Tensor, group: int, unit: float, x: Tensor, y: Tensor) -> None:
    """Write ``x @ W.T`` into ``y`` ``[n, rows]``."""
    cols = tiles.shape[1] * group
    x = pad(x, (0, cols - x.shape[1]))
    step = max(1, _BLOCK // (TILE * cols))
    rounded = None if code == BFLOAT16 else _round_activations(x, group, unit)
    for start in range(0, len(tiles), step):
        block = tiles[start : start + step]
        out = y[:, start * TILE : (start + step) * TILE]
        if rounded is None:
            out.copy_(linear(x, decode(code, block, group, unit))[:, : out.shape[1]])
        else:
            out.copy_(_by_groups(code, block, group, *rounded)[:, : out.shape[1]])


def decode(code: int, tiles: Tensor, group: int, unit: float) -> Tensor:
    """Decode all rows of tiles to float32, with padding: ``[32 * tiles, groups * group]``."""
    if code == BFLOAT16:
        return tiles.transpose(1, 2).reshape(len(tiles) * TILE, -1).float()
    codes, fields = _unpacked(code, tiles, group)
    if code == INT8:
        values = (codes - 128) * (fields[0] * unit)[..., None]
    else:
        values = codes * (fields[0] * unit)[..., None] + (fields[1] * unit)[..., None]
    return values.reshape(len(values), -1)


def _by_groups(code: int, tiles: Tensor, group: int, codes: Tensor, steps: Tensor, sums: Tensor) -> Tensor:
    """Sum by groups: integers below 2^24 from either byte, which float32 adds exactly in any order."""
    weights, fields = _unpacked(code, tiles, group)
    if code == INT8:
        weights = weights - 128
    weights = weights.permute(1, 2, 0)  # groups, group, rows
    high = torch.floor((codes + 128) / 256)
    low = codes - 256 * high
    counts = torch.bmm(high, weights).double() * 256 + torch.bmm(low, weights).double()
    y = torch.zeros(codes.shape[1], weights.shape[2])
    for number, count in enumerate(counts.float()):
        value = count * fields[0][:, number]
        if code == INT4:
            value = value + sums[number][:, None] * fields[1][:, number]
        y = y + value * steps[number][:, None]
    return y


def _round_activations(x: Tensor, group: int, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Round to 16-bit integers ``[groups, n, group]`` with steps and sums ``[groups, n]``, all float32."""
    parts = x.view(len(x), -1, group)
    most = parts.abs().amax(-1)
    finite = parts.isfinite().all(-1)
    live = finite & (most > LEAST)
    factor = torch.where(
        live, torch.full_like(most, TOP) / most, 0.0
    )  # TOP / most is a product with 1 / most
    codes = torch.where(live[..., None], parts * factor[..., None], 0.0).round()
    steps = torch.where(finite, torch.where(live, most / TOP * unit, 0.0), torch.nan)
    return codes.transpose(0, 1).contiguous(), steps.T, codes.double().sum(-1).float().T


def _unpacked(code: int, tiles: Tensor, group: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return codes ``[rows, groups, group]``, and scales and (for int4) minima ``[rows, groups]``, all float32."""
    count, groups = tiles.shape[:2]
    fields = 1 if code == INT8 else 2
    heads = tiles[..., : 2 * TILE * fields].contiguous().view(torch.float16).float()
    codes = tiles[..., 2 * TILE * fields :].reshape(count, groups, -1, TILE, 4)
    if code == INT4:
        codes = torch.stack([codes & 15, codes >> 4], 3)  # column c, then column c + 4
        codes = codes.permute(0, 4, 1, 2, 3, 5)
    else:
        codes = codes.permute(0, 3, 1, 2, 4)
    rows = count * TILE
    parts = heads.view(count, groups, fields, TILE).permute(2, 0, 3, 1).reshape(fields, rows, groups)
    return codes.reshape(rows, groups, group).float(), tuple(parts)


def _tiled(x: Tensor) -> Tensor:
    """Reshape ``[rows, groups, ...]`` to ``[tiles, groups, 32, ...]``, zero-padded after the last row."""
    x = torch.cat([x, x.new_zeros(-len(x) % TILE, *x.shape[1:])])
    return x.view(-1, TILE, *x.shape[1:]).transpose(1, 2)


def _quantise8(x: Tensor) -> tuple[tuple[Tensor], Tensor]:
    """Return scales ``[rows, groups]``, and codes from -127 to 127 in the shape of ``x`` ``[group, rows, groups]``."""
    cover = x.abs().amax(0) / 127
    best = _up(cover)
    least = _lost(x, _codes8(x, best) * best)
    for share in SHARES8:
        scale = (cover * torch.tensor(share)).half().float()
        lost = _lost(x, _codes8(x, scale) * scale)
        best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return (best,), _codes8(x, best)


def _quantise4(x: Tensor, there: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return scales, minima, and codes from 0 to 15; shapes as in ``_quantise8``."""
    low, high = torch.where(there, x, torch.inf).amin(0), torch.where(there, x, -torch.inf).amax(0)
    total, count = _sum(x, there), there.sum(0).float()
    minimum = -_up_signed(-low)
    scale = _up((high - minimum).clamp_min(0) / 15)
    best, least = (scale, minimum), _lost(x, _values4(x, scale, minimum), there)
    for share in torch.tensor(SHARES4):
        scale = ((high - low) / 15 * share).half().float()
        minimum = (low + (high - low) * ((1 - share) * 0.5)).half().float()
        for _ in range(FITS):
            codes = _codes4(x, scale, minimum)
            sums, squares, products = (_sum(v, there) for v in (codes, codes * codes, codes * x))
            spread, slope = count * squares - sums * sums, count * products - sums * total
            fits = (spread > 0) & (slope > 0)
            fitted = (slope / spread).half().float()
            minimum = torch.where(fits, ((total - fitted * sums) / count).half().float(), minimum)
            scale = torch.where(fits, fitted, scale)
        lost = _lost(x, _values4(x, scale, minimum), there)
        better = lost < least
        best = torch.where(better, scale, best[0]), torch.where(better, minimum, best[1])
        least = torch.minimum(lost, least)
    return best, _codes4(x, *best)


def _codes8(x: Tensor, scale: Tensor) -> Tensor:
    return (x * _inverse(scale)).clamp(-127, 127).round()


def _codes4(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((x - minimum) * _inverse(scale)).clamp(0, 15).round()


def _values4(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return _codes4(x, scale, minimum) * scale + minimum


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)


def _lost(x: Tensor, value: Tensor, there: Tensor | None = None) -> Tensor:
    lost = value - x
    return _sum(lost * lost, there)


def _sum(x: Tensor, there: Tensor | None) -> Tensor:
    """Sum over the columns, in order."""
    total = torch.zeros(x.shape[1:])
    for number, column in enumerate(x):
        total = total + (column if there is None else torch.where(there[number], column, 0.0))
    return total


def _up(x: Tensor) -> Tensor:
    """Round ``x`` >= 0 up to float16, as float32."""
    half = x.half()
    return torch.where(half.float() < x, (half.view(torch.int16) + 1).view(torch.float16), half).float()


def _up_signed(x: Tensor) -> Tensor:
    """Round ``x`` up to float16, as float32."""
    half = x.half()
    bits = half.view(torch.int16)
    # the next number above a negative one has a smaller magnitude
    next_up = torch.where(x > 0, bits + 1, bits - 1).view(torch.float16)
    return torch.where(half.float() < x, next_up, half).float()
