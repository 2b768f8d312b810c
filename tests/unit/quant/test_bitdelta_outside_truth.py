"""BitDelta's bits, scale and reconstruction against the definition of the authors' own code, in plain torch.

That code takes ``delta = tuned - base``, one scale ``delta.abs().mean()`` a matrix, the bit 1 where ``delta >= 0``,
and packs the bits of 32 inputs into one word. It needs widths that are a multiple of 32; here others are padded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gym_quant import get_codec

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile, apply_delta

SHAPES = [(4, 32), (64, 64), (7, 172), (3, 33), (5, 1), (2, 31), (1, 100)]


def authors_words(delta: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` to int32 words ``[out, ceil(in / 32)]``: bit k of word w is input 32 w + k."""
    bits = (delta >= 0).to(torch.int64)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 32))
    words = (bits.reshape(len(bits), -1, 32) << torch.arange(32)).sum(-1)
    return words.to(torch.int64)


def authors_weight(base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    signs = torch.where(delta >= 0, 1.0, -1.0)
    return base + signs * delta.abs().mean()


def delta_of(shape: tuple[int, int]) -> torch.Tensor:
    """Values of many sizes with exact zeros of both signs among them."""
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
    delta[torch.rand(shape, generator=torch.Generator().manual_seed(9)) < 0.2] = 0.0
    delta[0, 0] = -0.0
    return delta


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_the_authors_words_read_as_little_endian_bytes(shape: tuple[int, int]) -> None:
    delta = delta_of(shape)
    packed = get_codec("bitdelta").encode(delta).payload["bits"]
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4)).to(torch.int64)
    words = (padded.reshape(shape[0], -1, 4) << (8 * torch.arange(4))).sum(-1)
    assert torch.equal(words, authors_words(delta))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_scale_is_the_mean_magnitude_and_the_reconstruction_follows(shape: tuple[int, int]) -> None:
    delta = delta_of(shape)
    base = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codec = get_codec("bitdelta")
    encoded = codec.encode(delta)
    assert encoded.payload["scales"].dtype == torch.float32
    assert float(encoded.payload["scales"]) == pytest.approx(float(delta.abs().double().mean()), rel=1e-6)
    decoded = codec.decode(encoded.payload, shape, encoded.params)
    assert torch.allclose(base + decoded, authors_weight(base, delta), rtol=1e-6, atol=1e-7)


def test_zero_counts_as_positive_whatever_its_sign() -> None:
    encoded = get_codec("bitdelta").encode(torch.tensor([[0.0, -0.0, -1.0, 1.0]]))
    assert int(encoded.payload["bits"]) == 0b1011
    assert float(encoded.payload["scales"]) == 0.5


def test_a_tensor_of_zeros_decodes_to_zeros() -> None:
    encoded = get_codec("bitdelta").encode(torch.zeros(3, 40))
    assert not get_codec("bitdelta").decode(encoded.payload, (3, 40), encoded.params).any()


def test_a_file_written_and_applied_gives_the_authors_weights(tmp_path: Path) -> None:
    base = {
        f"m{i}.weight": torch.randn(s, generator=torch.Generator().manual_seed(i))
        for i, s in enumerate(SHAPES)
    }
    tuned = {name: weight + 0.01 * delta_of(tuple(weight.shape)) for name, weight in base.items()}
    wanted = {name: authors_weight(base[name], tuned[name] - base[name]) for name in base}
    spec = BaseSpec.of(base, "toy")
    policy = CodecPolicy(small_tensors="bitdelta", error_feedback=False)
    encode_delta(tuned, base, policy, tmp_path / "d.gymdelta", spec)
    with DeltaFile.open(tmp_path / "d.gymdelta", spec) as delta:
        apply_delta(base, delta)
    for name, weight in wanted.items():
        assert torch.allclose(base[name], weight, rtol=1e-6, atol=1e-7), name
