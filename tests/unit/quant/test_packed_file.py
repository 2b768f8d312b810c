"""Files of packed base weights: used where they were read, read by other readers, refused with the tensor's name."""

from __future__ import annotations

import copy
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant import CodecError
from gym_quant.linear import PackedLinear, get_linear
from gym_quant.packed_file import MAX_HEADER_BYTES, PackedFile, open_packed, write_packed
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "linears.safetensors"
FORMATS = ("bfloat16", "int4", "int8")
ONE = get_linear("int8").pack(torch.ones(1, 1))


def numbers(rows: int, cols: int) -> Tensor:
    """Numbers that every machine computes alike: small fractions with a power of two below them."""
    return ((torch.arange(rows * cols) * 37 % 101 - 50) / 256).reshape(rows, cols)


def contents() -> dict[str, PackedLinear | Tensor]:
    made: dict[str, PackedLinear | Tensor] = {
        f"layer.{name}": get_linear(name).pack(numbers(35, 41), None if name == "bfloat16" else 16)
        for name in FORMATS
    }
    return made | {
        "norm": numbers(1, 7)[0].bfloat16(),
        "table": numbers(3, 5).double().float(),
        "steps": torch.arange(5),
        "nothing": torch.empty(0, 4),
        "one": torch.tensor(2.5),
    }


def write_golden(path: Path) -> None:
    """How the golden file was made; again only with a new layout."""
    write_packed(path, contents(), {"base": "golden"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_golden(tmp_path / "packed.safetensors")
    return tmp_path / "packed.safetensors"


def check_equal(found: PackedFile) -> None:
    wanted = contents()
    assert found.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        other = found.tensors[name]
        if isinstance(value, Tensor):
            assert isinstance(other, Tensor)
            assert other.dtype == value.dtype
            assert torch.equal(other, value)
        else:
            assert isinstance(other, PackedLinear)
            assert type(other) is type(value)
            assert (other.rows, other.cols, other.nbytes) == (value.rows, value.cols, value.nbytes)
            assert torch.equal(other.decode_block(0, 35), value.decode_block(0, 35))


def test_what_was_written_is_read_and_multiplies(file: Path) -> None:
    found = open_packed(file)
    check_equal(found)
    assert found.metadata == {"base": "golden"}
    x, y, z = torch.randn(3, 41), torch.empty(3, 35), torch.empty(3, 35)
    for name, value in contents().items():
        if isinstance(value, PackedLinear):
            other = found.tensors[name]
            assert isinstance(other, PackedLinear)
            value.multiply(x, y)
            other.multiply(x, z)
            assert torch.equal(y, z)


def test_the_golden_file_is_what_the_packers_write(tmp_path: Path) -> None:
    write_golden(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == GOLDEN.read_bytes()
    check_equal(open_packed(GOLDEN))


def test_tensors_view_one_buffer_at_addresses_of_whole_cache_lines(file: Path) -> None:
    found = open_packed(file).tensors
    size = file.stat().st_size
    tiles = [v.tensors()["tiles"] for v in found.values() if isinstance(v, PackedLinear)]
    addresses = [t.data_ptr() for t in tiles]
    assert all(address % 64 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < size, "copies would lie anywhere"
    norm = found["norm"]
    assert isinstance(norm, Tensor)
    assert abs(norm.data_ptr() - addresses[0]) < size


def test_a_file_that_changes_after_it_was_checked_changes_no_weight(file: Path) -> None:
    found = open_packed(file)
    with file.open("r+b") as other:
        other.seek(file.stat().st_size // 2)
        other.write(b"\xff" * (file.stat().st_size // 2))
    os.truncate(file, 4096)
    check_equal(found)


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(file: Path) -> None:
    def shorten(status: os.stat_result) -> None:
        os.truncate(file, status.st_size - 1)

    with pytest.raises(CodecError, match="became shorter"):
        open_packed(file, shorten)


def test_other_readers_of_safetensors_read_the_file(file: Path) -> None:
    with safe_open(file, "pt") as other:
        assert {"layer.int8.tiles", "layer.int8.unit", "layer.bfloat16.tiles", "norm"} <= set(other.keys())
        assert torch.equal(other.get_tensor("table"), contents()["table"])
        assert other.metadata()["base"] == "golden"


def test_a_failed_write_leaves_what_was_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_packed(file, {"other": torch.ones(3)})
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"": torch.ones(1)}, {}, "'' is not a valid tensor name"),
        ({"__metadata__": torch.ones(1)}, {}, "'__metadata__' is not a valid tensor name"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, {}, r"tensor 'a' is \[1\] torch\.complex64"),
        ({"a": torch.ones(1)}, {"linears": "x"}, "metadata 'linears'"),
        ({"a": torch.ones(1)}, {"sha256": "x"}, "metadata 'sha256'"),
        ({"a": torch.ones(1)}, {"x": 3}, "metadata 'x'"),
        (
            {"a": get_linear("int8").pack(torch.ones(1, 1)), "a.tiles": torch.ones(1)},
            {},
            r"'a\.tiles' would be stored twice",
        ),
    ],
)
def test_what_a_file_cannot_hold_is_refused_and_nothing_is_written(
    tmp_path: Path, tensors: Any, metadata: Any, words: str
) -> None:
    with pytest.raises(CodecError, match=words):
        write_packed(tmp_path / "file", tensors, metadata)
    assert list(tmp_path.iterdir()) == []


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    end = 8 + int(struct.unpack("<Q", raw[:8])[0])
    return json.loads(raw[8:end]), raw[end:]


def join(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def linears(header: dict[str, Any], **changes: Any) -> None:
    table = json.loads(header["__metadata__"]["linears"])
    table["layer.int8"].update(changes)
    header["__metadata__"]["linears"] = json.dumps(table)


def longer(entry: dict[str, Any]) -> None:
    entry["shape"], entry["data_offsets"][1] = [entry["shape"][0] + 1], entry["data_offsets"][1] + 2


HOSTILE = {
    "overlap": (lambda h: h["norm"].update(data_offsets=h["table"]["data_offsets"]), "tensor 'norm' has 60 bytes"),
    "gap": (lambda h: h.pop("norm"), r"has \d+ bytes of data, not the \d+"),
    "same bytes twice": (
        lambda h: h.update(copied=copy.deepcopy(h["table"])),
        "tensor '(copied|table)' begins at byte",
    ),
    "past the end": (lambda h: longer(h["norm"]), "bytes of data, not the"),
    "negative": (lambda h: h["norm"].update(data_offsets=[-14, 0]), "tensor 'norm' needs two data_offsets"),
    "backwards": (lambda h: h["norm"].update(data_offsets=[20, 6]), "tensor 'norm' has -14 bytes"),
    "huge": (lambda h: h["norm"].update(shape=[1 << 61, 8]), "tensor 'norm' has 14 bytes, not those of"),
    "beyond 64 bits": (lambda h: h["norm"].update(shape=[1 << 70]), "tensor 'norm' needs a shape"),
    "fraction": (lambda h: h["norm"].update(shape=[7.0]), "tensor 'norm' needs a shape"),
    "truth value": (lambda h: h["one"].update(shape=[True]), "tensor 'one' needs a shape"),
    "many dimensions": (lambda h: h["one"].update(shape=[1] * 9), "tensor 'one' needs a shape"),
    "dtype": (lambda h: h["norm"].update(dtype="F8_E4M3"), "tensor 'norm' has dtype 'F8_E4M3'"),
    "dtype of a list": (lambda h: h["norm"].update(dtype=[]), r"tensor 'norm' has dtype \[\]"),
    "more keys": (lambda h: h["norm"].update(more=1), "tensor 'norm' must have exactly dtype, shape and data_offsets"),
    "no entry": (lambda h: h.update(norm=3), "tensor 'norm' must have exactly dtype"),
    "no metadata": (lambda h: h.pop("__metadata__"), "its metadata are not strings"),
    "metadata of numbers": (lambda h: h["__metadata__"].update(x=1), "its metadata are not strings"),
    "no table": (lambda h: h["__metadata__"].pop("linears"), "not a file of packed weights"),
    "table": (lambda h: h["__metadata__"].update(linears="[]"), "table of 'linears' is not an object"),
    "no digests": (lambda h: h["__metadata__"].pop("sha256"), "metadata have no 'sha256'"),
    "digests": (lambda h: h["__metadata__"].update(sha256="[]"), "table of 'sha256' is not an object"),
    "digests of others": (lambda h: h["__metadata__"].update(sha256="{}"), "'sha256' does not list exactly"),
    "entry of the table": (
        lambda h: h["__metadata__"].update(linears='{"layer.int8": 3}'),
        r"tensor 'layer\.int8': must have exactly format, rows",
    ),
    "format": (lambda h: linears(h, format="int3"), r"tensor 'layer\.int8': has format 'int3', not one of"),
    "rows": (lambda h: linears(h, rows=65), r"tensor 'layer\.int8': tiles are \[2, 3, 576\].*not \[3, 3, 576\]"),
    "cols": (lambda h: linears(h, cols=49), r"tensor 'layer\.int8': tiles are"),
    "no rows": (lambda h: linears(h, rows=0), r"tensor 'layer\.int8': weights are \[0, 41\]"),
    "rows of text": (lambda h: linears(h, rows="35"), r"tensor 'layer\.int8': has rows '35'"),
    "fields": (lambda h: linears(h, fields=["tiles"]), r"tensor 'layer\.int8': tensors are \['tiles'\]"),
    "no field": (lambda h: linears(h, fields=["tiles", "x"]), r"tensor 'layer\.int8': has no separate tensor 'x'"),
    "field twice": (lambda h: linears(h, fields=["tiles", "tiles"]), r"tensor 'layer\.int8': has no separate tensor"),
    "fields of numbers": (lambda h: linears(h, fields=[1]), r"tensor 'layer\.int8': has fields"),
    "shape of tiles": (
        lambda h: h["layer.int8.tiles"].update(shape=[6, 1, 576]),
        r"tensor 'layer\.int8': tiles are \[6, 1, 576\]",
    ),
    "flat tiles": (
        lambda h: h["layer.int8.tiles"].update(shape=[2 * 3 * 576]),
        r"tensor 'layer\.int8': group_size is 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_with_the_tensors_name(file: Path, name: str) -> None:
    change, words = HOSTILE[name]
    header, data = split(file)
    change(header)
    join(file, header, data)
    with pytest.raises(CodecError, match=words) as error:
        open_packed(file)
    assert str(error.value).startswith(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b'{"a": \xff}', "not JSON in UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON in UTF-8"),
        (b"[]", "header is not an object"),
        (b'{"a": 1, "a": 2}', "duplicate name"),
        (b'{"__metadata__": {"linears": "{}"}}', "bytes of data, not the 0"),
    ],
)
def test_a_header_that_is_no_object_of_tensors_is_refused(file: Path, text: bytes, words: str) -> None:
    join(file, text, split(file)[1])
    with pytest.raises(CodecError, match=words):
        open_packed(file)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x01", "truncated: 1 bytes"),
        (struct.pack("<Q", 56) + b"{}", "truncated"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "over the limit"),
        (struct.pack("<Q", 1 << 63), "over the limit"),
        (struct.pack("<Q", 2) + b"{}", "not a multiple of 64"),
    ],
)
def test_a_file_without_a_whole_header_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(CodecError, match=words):
        open_packed(tmp_path / "file")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011 (a directory is refused by the system's own words)
        open_packed(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_packed(tmp_path / "none")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(CodecError, match="not a regular file"):
            open_packed(tmp_path / "pipe")


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_scales_that_are_not_finite_are_refused(file: Path, format: str, bits: int, place: int) -> None:
    header, data = split(file)
    start, stop = header[f"layer.{format}.tiles"]["data_offsets"]
    width = 64 if format == "int8" else 128
    record = (stop - start) // 6
    at = start + (5 if place < 0 else place) * record + (width - 2 if place else 0)
    join(file, header, data[:at] + struct.pack("<H", bits) + data[at + 2 :])
    with pytest.raises(CodecError, match=rf"tensor 'layer\.{format}': tiles hold a scale that is not finite"):
        open_packed(file)


@pytest.mark.parametrize(
    "name", ["layer.int8.tiles", "layer.int4.tiles", "layer.bfloat16.tiles", "norm", "one"]
)
@pytest.mark.parametrize("last", [False, True])
def test_a_bit_that_changed_in_any_tensor_is_noticed(file: Path, name: str, last: bool) -> None:
    header, data = split(file)
    start, stop = header[name]["data_offsets"]
    at = stop - 1 if last else start + (stop - start) // 2
    join(file, header, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CodecError, match=rf"tensor '{name}'"):
        open_packed(file)


def test_a_file_whose_status_is_refused_is_not_read(file: Path) -> None:
    def refuse(status: os.stat_result) -> None:
        raise CodecError(f"has {status.st_size} bytes")

    with pytest.raises(CodecError, match=f"has {file.stat().st_size} bytes"):
        open_packed(file, refuse)


@pytest.mark.parametrize("unit", [0.0, -1.0, 3.0, float("nan"), float("inf"), 2.0**-120])
def test_a_unit_that_is_no_power_of_two_is_refused(file: Path, unit: float) -> None:
    header, data = split(file)
    at = header["layer.int8.unit"]["data_offsets"][0]
    join(file, header, data[:at] + struct.pack("<f", unit) + data[at + 4 :])
    with pytest.raises(CodecError, match=r"tensor 'layer\.int8': unit is"):
        open_packed(file)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_header_is_refused_or_read_and_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(GOLDEN.read_bytes())
    end = 8 + int(struct.unpack("<Q", raw[:8])[0])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.unlink(missing_ok=True)
    file.write_bytes(raw)
    try:
        found = open_packed(file)
    except CodecError:
        return
    for value in found.tensors.values():
        if isinstance(value, PackedLinear):
            assert bool(value.decode_block(0, value.rows).isfinite().all())
