"""What a listener learns from the size of an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta


@pytest.mark.parametrize("codec", ["bitdelta", "ternary", "int4", "dense", "auto"])
def test_the_size_of_an_update_depends_on_codec_and_shapes_and_not_on_what_was_learned(
    codec: str, tmp_path: Path
) -> None:
    base = {
        "a.weight": torch.zeros(64, 96),
        "model.embed_tokens.weight": torch.zeros(100, 64),
        "n": torch.ones(64),
    }
    spec = BaseSpec("m", "sha256:" + "a" * 64, {name: tuple(value.shape) for name, value in base.items()})
    sizes = set()
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        share, scale = (seed + 1) / 5, 10.0**-seed
        tuned = {
            name: value
            + scale
            * torch.randn(value.shape, generator=draw)
            * (torch.rand(value.shape, generator=draw) < share)
            for name, value in base.items()
        }
        policy = CodecPolicy.model_validate({"codec": codec, "error_feedback": False})
        sizes.add(encode_delta(tuned, base, policy, tmp_path / f"{seed}.gymdelta", spec).size_bytes)
    assert len(sizes) == 1, sizes
