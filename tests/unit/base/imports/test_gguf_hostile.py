"""Whatever the bytes of a GGUF file are, it is read or refused: no crash, and no memory beyond the file."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.imports.gguf.header import read_header
from gym_fed.base.imports.gguf.reader import GgufImporter, _refused_by_name
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.gguf_files import write_gguf

pytest.importorskip("gguf", reason="the extra export is not installed")

FLIPS = 200
MOST_BYTES = 16 << 20
"""Of memory, while a file of 170 kB is read."""


def refusal(file: Path) -> GymError | None:
    error = None
    try:
        read_header(file)
    except GymError as found:
        error = found
    assert error is None or (error.code is ErrorCode.MODEL_INVALID and str(file) in error.message)
    return error


def header_size(data: bytes, file: Path) -> int:
    return min(one.start for one in read_header(file).tensors.values())


def test_a_file_cut_at_any_byte_of_its_header_is_refused(qwen3_file: Path, tmp_path: Path) -> None:
    data = qwen3_file.read_bytes()
    end = header_size(data, qwen3_file)
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 600), *range(600, end, 97), end - 1, end, len(data) - 1]:
        cut.write_bytes(data[:length])
        assert refusal(cut) is not None, length


def test_flipped_bytes_of_a_header_are_read_or_refused(qwen3_file: Path, tmp_path: Path) -> None:
    data = qwen3_file.read_bytes()
    end = header_size(data, qwen3_file)
    flipped, rng, refusals = tmp_path / "flipped.gguf", random.Random(7), 0
    tracemalloc.start()
    for _ in range(FLIPS):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4, 32))):
            changed[rng.randrange(4, end)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        flipped.write_bytes(changed)
        refusals += refusal(flipped) is not None
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusals > FLIPS // 20
    assert most < MOST_BYTES


def test_flipped_files_are_imported_whole_or_refused(qwen3_file: Path, tmp_path: Path) -> None:
    data = qwen3_file.read_bytes()
    end = header_size(data, qwen3_file)
    file, rng, refusals = tmp_path / "flipped.gguf", random.Random(11), 0
    for number in range(25):
        changed = bytearray(data)
        changed[rng.randrange(24, end)] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            GgufImporter().write(file, folder, lambda _done, _total: None)
        except GymError:
            refusals += 1
    assert 0 < refusals <= 25


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes are too few for a GGUF file"),
        (b"PK" + bytes(40), "does not begin like"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "GGUF version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "tensors and 0 keys"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), f"{1 << 60:,} keys"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 63), "a string of 9,223,372,036,854,775,808 bytes"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 62), "an array of"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1), "value of type 9"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 1 << 62), "continues past"),
        (struct.pack("<4sIQQQ1sI4QIQ", b"GGUF", 3, 1, 0, 1, b"t", 4, *[1 << 40] * 4, 0, 0), "has shape"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 8, 0, 1 << 62), "is at bytes"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 8, 99, 0), "is of type 99"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 8, 2, 0), "not a multiple of 32"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"t", 5), "5 dimensions"),
    ],
)
def test_counts_and_places_beyond_the_file_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(data)
    error = refusal(file)
    assert error is not None
    assert said in error.message


def test_tensors_that_share_bytes_are_refused_when_they_are_more_than_the_file(tmp_path: Path) -> None:
    infos = b"".join(struct.pack("<Q1sIQIQ", 1, bytes([97 + n]), 1, 256, 0, 0) for n in range(8))
    file = tmp_path / "shared.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 8, 0) + infos + bytes(2048))
    error = refusal(file)
    assert error is not None
    assert "tensors of 8,192 bytes" in error.message


@pytest.mark.parametrize(
    "keys",
    [
        {"general.type": [3, 4]},
        {"split.count": [3, 4]},
        {"general.name": [3, 4]},
        {"tokenizer.ggml.add_eos_token": [3, 4]},
        {"qwen3.expert_count": [3, 4]},
        {"qwen3.attention.value_length": [3, 4]},
        {"qwen3.attention.key_length": 2**31 - 1, "qwen3.attention.value_length": 2**31 - 1},
        {"qwen3.embedding_length": 2**31 - 1, "qwen3.feed_forward_length": 2**31 - 1},
        {"qwen3.rope.freq_base": 1e-300},
        {"tokenizer.chat_templates": ["../up"], "tokenizer.chat_template.../up": "x"},
    ],
)
def test_values_over_which_a_library_stumbles_are_refused(
    qwen3: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    file = write_gguf(qwen3, tmp_path / "hostile.gguf", keys=keys)
    (tmp_path / "out").mkdir()
    with pytest.raises(GymError) as raised:
        GgufImporter().write(file, tmp_path / "out", lambda _done, _total: None)
    assert raised.value.code is ErrorCode.MODEL_INVALID
    assert str(file) in raised.value.message


def test_a_panic_of_the_tokenizers_library_is_a_refusal(qwen3: Path, tmp_path: Path) -> None:
    whole = json.loads((qwen3 / "tokenizer.json").read_text())
    whole["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AA=="}
    keys = {"tokenizer.huggingface.json": json.dumps(whole)}
    file = write_gguf(qwen3, tmp_path / "panic.gguf", keys=keys)
    (tmp_path / "out").mkdir()
    with pytest.raises(GymError, match="precompiled_charsmap") as raised:
        GgufImporter().write(file, tmp_path / "out", lambda _done, _total: None)
    assert raised.value.code is ErrorCode.MODEL_INVALID


def test_a_full_disk_is_not_taken_for_a_broken_file(tmp_path: Path) -> None:
    for error in (
        OSError(28, "no space"),
        RuntimeError("I/O error: (os error 28)"),
        MemoryError(),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)), _refused_by_name(tmp_path):
            raise error


def test_more_layers_than_the_tensors_make_are_refused_before_they_are_built(
    qwen3: Path, tmp_path: Path
) -> None:
    file = write_gguf(qwen3, tmp_path / "deep.gguf", keys={"qwen3.block_count": 20}, more=tuple("abcdefg"))
    with pytest.raises(GymError, match="block_count is 20"):
        GgufImporter().bytes_needed(file)


def test_a_name_that_says_no_parts_is_one_file(qwen3_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "small-00001-of-00000.gguf"
    file.write_bytes(qwen3_file.read_bytes())
    assert GgufImporter().bytes_needed(file) > 0
