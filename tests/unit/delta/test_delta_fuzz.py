"""Whatever bytes a delta file holds, reading it ends in finite values or in a ``GymError``; every codec is tried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gym_quant import codec_names, get_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta

SHAPES = {"norm": (7,), "odd": (3, 43), "wide": (5, 64)}
SPEC = BaseSpec("fuzzed", "sha256:" + "5" * 64, SHAPES)
REFUSALS = {ErrorCode.DELTA_INVALID, ErrorCode.BASE_MISMATCH, ErrorCode.TOO_LARGE}
FUZZ = settings(max_examples=25, derandomize=True)


def written(folder: Path, codec: str) -> bytes:
    """A valid file in which every tensor that can be has the codec."""
    generator = torch.Generator().manual_seed(1)
    entries = []
    for name, shape in SHAPES.items():
        member = get_codec("dense" if codec == "lora" and len(shape) < 2 else codec)
        params = {"rank": 2} if member.name == "lora" else {}
        encoded = member.encode(torch.randn(shape, generator=generator), **params)
        entries.append(DeltaEntry(name, shape, member.name, encoded.params, lambda e=encoded: e.payload))
    path = folder / f"{codec}.gymdelta"
    write_delta(path, entries, SPEC)
    return path.read_bytes()


def read_everything(path: Path) -> None:
    """Open, decode, and measure; anything but a refusal by name must be finite."""
    try:
        with DeltaFile.open(path, SPEC) as delta:
            assert delta.norm() >= 0.0
            for name in delta.names:
                decoded = delta.decode(name)
                assert tuple(decoded.shape) == SHAPES[name]
                assert bool(torch.isfinite(decoded).all()), name
    except GymError as error:
        if error.code not in REFUSALS:
            raise


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("valid")
    return {codec: written(folder, codec) for codec in codec_names()}


@pytest.mark.parametrize("codec", codec_names())
@FUZZ
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12)
)
def test_bytes_changed_anywhere(
    files: dict[str, bytes], tmp_path: Path, codec: str, edits: list[tuple[float, int]]
) -> None:
    data = bytearray(files[codec])
    for where, value in edits:
        data[int(where * len(data))] = value
    path = tmp_path / "fuzzed.gymdelta"
    path.write_bytes(data)
    read_everything(path)


@pytest.mark.parametrize("codec", codec_names())
@FUZZ
@given(noise=st.binary(min_size=1, max_size=512), repeat=st.booleans())
def test_a_payload_of_noise_under_a_valid_header(
    files: dict[str, bytes], tmp_path: Path, codec: str, noise: bytes, repeat: bool
) -> None:
    data = files[codec]
    start = 8 + int.from_bytes(data[:8], "little")
    size = len(data) - start
    payload = (
        (noise * (size // len(noise) + 1))[:size] if repeat else noise[:size] + data[start + len(noise) :]
    )
    path = tmp_path / "fuzzed.gymdelta"
    path.write_bytes(data[:start] + payload[:size])
    read_everything(path)


@pytest.mark.parametrize("codec", codec_names())
def test_a_file_cut_at_any_byte_is_refused(files: dict[str, bytes], tmp_path: Path, codec: str) -> None:
    data = files[codec]
    path = tmp_path / "cut.gymdelta"
    for end in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(GymError) as caught:
            DeltaFile.open(path, SPEC)
        assert caught.value.code in REFUSALS
