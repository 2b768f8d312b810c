"""Broken and hostile files: each is refused, by name, before anything is decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.mapped import DeltaLimits
from gym_fed.delta.writer import DeltaEntry, write_delta

BASE = {
    "layers.0.down.weight": torch.zeros(3, 172),
    "layers.1.down.weight": torch.zeros(3, 172),
    "norm.weight": torch.zeros(5),
    "q.weight": torch.zeros(8, 12),
}
SPEC = BaseSpec.of(BASE, "tiny")


def delta_of(name: str) -> torch.Tensor:
    return torch.randn(BASE[name].shape, generator=torch.Generator().manual_seed(len(name)))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.gymdelta"
    entries = [
        DeltaEntry.of("layers.0.down.weight", delta_of("layers.0.down.weight")),
        DeltaEntry.of("layers.1.down.weight", delta_of("layers.1.down.weight")),
        DeltaEntry.of("norm.weight", delta_of("norm.weight"), "dense"),
        DeltaEntry.of("q.weight", delta_of("q.weight"), "lora", rank=2),
    ]
    write_delta(path, entries, SPEC)
    return path


Header = dict[str, Any]
Manifest = dict[str, Any]


def split(data: bytes) -> tuple[Header, Manifest, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["gymdelta"]), data[end:]


def join(header: Header, manifest: Manifest | str, body: bytes) -> bytes:
    text = manifest if isinstance(manifest, str) else canonical(manifest)
    return frame(json.dumps({**header, "__metadata__": {"gymdelta": text}}, separators=(",", ":")), body)


def frame(header: str, body: bytes) -> bytes:
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def canonical(manifest: Manifest) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def refuse(
    path: Path, data: bytes, spec: BaseSpec | None = SPEC, limits: DeltaLimits | None = None
) -> GymError:
    path.write_bytes(data)
    with pytest.raises(GymError) as caught:
        DeltaFile.open(path, spec, limits)
    assert str(path) in caught.value.message
    return caught.value


def change_row(name: str, change: Callable[[list[Any]], object]) -> Callable[[Manifest], None]:
    def edit(manifest: Manifest) -> None:
        (row,) = [row for row in manifest["tensors"] if row[0] == name]
        change(row)

    return edit


MANIFESTS: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "another format version": (lambda m: m.update(format=2), "format version 2 is not supported"),
    "a format version that is true": (lambda m: m.update(format=True), "format version True"),
    "an unknown codec": (lambda m: m["codecs"][0].__setitem__(0, "zip"), "unknown codec 'zip'"),
    "an unknown codec parameter": (
        lambda m: m["codecs"][0][1].update(colour=1),
        "tensor 'layers.0.down.weight': codec 'bitdelta' has no parameter 'colour'",
    ),
    "a default written out": (
        lambda m: m["codecs"][0][1].update(scale_dtype="float32"),
        "tensor 'layers.0.down.weight': parameters",
    ),
    "a rank that is a float": (
        lambda m: m["codecs"][2][1].update(rank=2.0),
        "tensor 'q.weight': rank is 2.0",
    ),
    "a rank above the matrix": (lambda m: m["codecs"][2][1].update(rank=9), "tensor 'q.weight': rank is 9"),
    "a nested parameter": (lambda m: m["codecs"][2][1].update(rank=[2]), "codec 'lora': parameter 'rank'"),
    "another shape": (
        change_row("q.weight", lambda row: row.__setitem__(1, [12, 8])),
        "tensor 'q.weight': shape [12, 8] is not the base's [8, 12]",
    ),
    "a zero dimension": (
        change_row("q.weight", lambda row: row.__setitem__(1, [0, 12])),
        "tensor 'q.weight': shape [0, 12] is not a list of positive",
    ),
    "a negative dimension": (
        change_row("q.weight", lambda row: row.__setitem__(1, [-8, -12])),
        "tensor 'q.weight': shape [-8, -12]",
    ),
    "a boolean dimension": (
        change_row("q.weight", lambda row: row.__setitem__(1, [True, 12])),
        "tensor 'q.weight'",
    ),
    "endless dimensions": (
        change_row("q.weight", lambda row: row.__setitem__(1, [1 << 40, 1 << 40])),
        "tensor 'q.weight': shape",
    ),
    "a tensor the base lacks": (
        change_row("q.weight", lambda row: row.__setitem__(0, "z.weight")),
        "tensor 'z.weight': the base 'tiny' has no such tensor",
    ),
    "a duplicate name": (
        change_row("q.weight", lambda row: row.__setitem__(0, "norm.weight")),
        "tensor 'norm.weight' is listed twice",
    ),
    "overlapping ranges": (
        lambda m: m.update(tensors=[["layers.*.down.weight", "0-1,1", [3, 172], 0]]),
        "tensor 'layers.1.down.weight' is listed twice",
    ),
    "a range that explodes": (
        change_row("layers.*.down.weight", lambda row: row.__setitem__(1, "0-999999999")),
        "tensor 'layers.*.down.weight': the file lists more tensors than allowed",
    ),
    "a range that is none": (
        change_row("layers.*.down.weight", lambda row: row.__setitem__(1, "zero")),
        "tensor 'layers.*.down.weight': 'zero' is not a list of ranges",
    ),
    "a range without a star": (
        change_row("layers.*.down.weight", lambda row: row.__setitem__(0, "layers.down")),
        "tensor 'layers.down'",
    ),
    "a row of the wrong length": (
        change_row("q.weight", lambda row: row.pop()),
        "tensor row ['q.weight', [8, 12]]",
    ),
    "a codec number out of range": (
        change_row("q.weight", lambda row: row.__setitem__(2, 7)),
        "tensor 'q.weight': codec number 7 is not in the table of 3",
    ),
    "a codec number below zero": (
        change_row("q.weight", lambda row: row.__setitem__(2, -1)),
        "codec number -1",
    ),
    "control characters in a name": (
        change_row("q.weight", lambda row: row.__setitem__(0, "q\x1b[2J")),
        r"tensor name 'q\x1b[2J' is empty or not printable",
    ),
    "rows out of order": (lambda m: m["tensors"].reverse(), "not in canonical form"),
    "no tensors key": (lambda m: m.pop("tensors"), "manifest key 'tensors' is missing"),
    "an unknown key": (lambda m: m.update(colour="red"), "unknown key 'colour'"),
    "a digest that is none": (lambda m: m.update(base_digest="sha256:xyz"), "base_digest 'sha256:xyz'"),
    "extra that is no object of strings": (lambda m: m.update(extra={"a": 1}), "manifest key 'extra'"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_with(what: str, good: Path) -> None:
    change, message = MANIFESTS[what]
    header, manifest, body = split(good.read_bytes())
    change(manifest)
    error = refuse(good, join(header, manifest, body))
    assert error.code is ErrorCode.DELTA_INVALID
    assert message in error.message


def test_the_file_these_are_made_from_is_good(good: Path) -> None:
    header, manifest, body = split(good.read_bytes())
    good.write_bytes(join(header, manifest, body))
    with DeltaFile.open(good, SPEC) as delta:
        assert delta.names == tuple(sorted(BASE))


def test_a_delta_of_another_base_is_refused(good: Path) -> None:
    other = BaseSpec.of({**BASE, "norm.weight": torch.ones(5)}, "other")
    error = refuse(good, good.read_bytes(), other)
    assert error.code is ErrorCode.BASE_MISMATCH
    assert SPEC.digest in error.message
    assert other.digest in error.message


def test_more_tensors_than_the_base_has_are_refused(good: Path) -> None:
    small = BaseSpec(SPEC.model_name, SPEC.digest, {"norm.weight": (5,)})
    assert "more tensors than allowed" in refuse(good, good.read_bytes(), small).message


def test_300_000_tensors_in_one_short_row_are_refused_before_they_are_made(good: Path) -> None:
    header, manifest, body = split(good.read_bytes())
    manifest["tensors"] = [["t.*.w", "0-299999", [1], 0]]
    assert "more tensors than allowed" in refuse(good, join(header, manifest, body), None).message


def test_300_000_empty_tensors_in_the_header_are_refused(good: Path) -> None:
    header, manifest, body = split(good.read_bytes())
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    flood = {**header, **{f"t{index}": empty for index in range(300_000)}}
    assert "over the limit of 8388608" in refuse(good, join(flood, manifest, body)).message
    many = {**header, **{f"t{index}": empty for index in range(1000)}}
    assert "section 't0'" in refuse(good, join(many, manifest, body)).message


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 20])
def test_a_file_cut_inside_its_header_is_refused(keep: int, good: Path) -> None:
    assert "is truncated" in refuse(good, good.read_bytes()[:keep]).message


def test_a_file_cut_inside_a_tensor_is_refused_with_its_name(good: Path) -> None:
    data = good.read_bytes()
    assert "is truncated: tensor 'layers.1.down.weight' ends at byte" in refuse(good, data[:-1]).message
    header, manifest, body = split(data)
    assert (
        "is truncated: tensor 'q.weight' ends at byte"
        in refuse(good, join(header, manifest, body[:40])).message
    )


def test_trailing_bytes_are_refused(good: Path) -> None:
    assert "has 3 trailing bytes" in refuse(good, good.read_bytes() + b"abc").message


def test_overlapping_and_shifted_sections_are_refused_with_the_first_tensor_in_them(good: Path) -> None:
    header, manifest, body = split(good.read_bytes())
    start, end = header["u8"]["data_offsets"]
    for offsets in ([0, end - start], [start + 8, end + 8], [start, end - 1], [end, start], [start, 1 << 70]):
        broken = {**header, "u8": {**header["u8"], "data_offsets": offsets}}
        message = refuse(good, join(broken, manifest, body)).message
        assert "section 'u8' (from tensor 'layers.0.down.weight' on)" in message


def test_a_section_of_another_type_or_length_is_refused(good: Path) -> None:
    header, manifest, body = split(good.read_bytes())
    for change in ({"dtype": "I8"}, {"shape": [1]}, {"shape": "all"}, {"more": 1}):
        broken = {**header, "u8": {**header["u8"], **change}}
        assert "section 'u8'" in refuse(good, join(broken, manifest, body)).message
    missing = {key: value for key, value in header.items() if key != "u8"}
    assert "section 'u8'" in refuse(good, join(missing, manifest, body)).message


def test_a_header_that_claims_to_be_huge_is_refused_before_it_is_read(good: Path) -> None:
    for length in (1 << 63, (1 << 64) - 1, 1 << 40):
        assert "is truncated" in refuse(good, length.to_bytes(8, "little") + b"{}").message


def test_a_header_over_the_limit_is_refused(good: Path) -> None:
    message = refuse(good, good.read_bytes(), SPEC, DeltaLimits(max_header_bytes=64)).message
    assert "over the limit of 64" in message


def test_a_file_over_the_size_limit_is_refused(good: Path) -> None:
    assert (
        "over the limit of 100"
        in refuse(good, good.read_bytes(), SPEC, DeltaLimits(max_file_bytes=100)).message
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[" * 200_000, "header is nested too deeply"),
        ('{"a":' * 100_000, "header is nested too deeply"),
        ("[]", "header is not a JSON object"),
        ("{}", "is not a .gymdelta"),
        ('{"a":1,"a":2}', "'a' occurs twice in one object"),
        ('{"a":NaN}', "NaN is not a number"),
        ('{"a":1e999}', "header is not valid JSON"),
        ('{"a":' + "9" * 5000 + "}", "header is not valid JSON"),
        ('{"\\ud800":1}', "header is not valid JSON"),
        ('{"__metadata__":{"gymdelta":1}}', "is not a .gymdelta"),
        ('{"__metadata__":{"gymdelta":"{}","more":""}}', "is not a .gymdelta"),
        ('{"__metadata__":{"gymdelta":"[[[["}}', "manifest is not valid JSON"),
        ('{"__metadata__":{"gymdelta":"' + "[" * 100_000 + '"}}', "manifest is nested too deeply"),
    ],
)
def test_a_header_that_is_not_one_is_refused(header: str, message: str, good: Path) -> None:
    assert message in refuse(good, frame(header, b"")).message


def test_a_header_that_is_not_text_is_refused(good: Path) -> None:
    assert "not UTF-8 at byte 9" in refuse(good, (8).to_bytes(8, "little") + b"{\xff      ").message


def overwrite(path: Path, section: str, at: int, values: torch.Tensor) -> bytes:
    header, _, _ = split(path.read_bytes())
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little") + header[section]["data_offsets"][0] + at
    raw = values.view(torch.uint8).numpy().tobytes()
    data[start : start + len(raw)] = raw
    return bytes(data)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_a_scale_that_is_not_finite_or_negative_is_refused_with_its_tensor(bad: float, good: Path) -> None:
    message = refuse(good, overwrite(good, "f32", 4, torch.tensor([bad]))).message
    assert "tensor 'layers.1.down.weight': scale is" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dense_values_and_factors_that_are_not_finite_are_refused_with_their_tensor(
    bad: float, good: Path
) -> None:
    value = torch.tensor([bad], dtype=torch.bfloat16)
    assert (
        "tensor 'norm.weight': value is not finite" in refuse(good, overwrite(good, "bf16", 4, value)).message
    )


def test_factors_that_are_not_finite_are_refused_with_their_tensor(good: Path) -> None:
    value = torch.tensor([float("nan")], dtype=torch.bfloat16)
    data = good.read_bytes()
    assert "tensor 'q.weight': factor A" in refuse(good, overwrite(good, "bf16", 10, value)).message
    good.write_bytes(data)
    assert (
        "tensor 'q.weight': factor B" in refuse(good, overwrite(good, "bf16", 10 + 2 * 2 * 12, value)).message
    )


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GymError) as caught:
        DeltaFile.open(tmp_path / "absent.gymdelta")
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    os.mkfifo(tmp_path / "pipe.gymdelta")
    for path in (tmp_path, tmp_path / "pipe.gymdelta"):
        with pytest.raises(GymError, match="is not a regular file") as caught:
            DeltaFile.open(path)
        assert caught.value.code is ErrorCode.DELTA_INVALID


@given(flips=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=120)
def test_random_bytes_never_raise_anything_but_a_gym_error(good: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(good.read_bytes())
    for place, value in flips:
        data[place % len(data)] = value
    assert_open_or_refused(good.with_name("fuzzed.gymdelta"), bytes(data))


@given(cut=st.tuples(st.integers(0, 1 << 30), st.integers(0, 40)), patch=st.text(max_size=20))
@settings(max_examples=120)
def test_edited_headers_never_raise_anything_but_a_gym_error(
    good: Path, cut: tuple[int, int], patch: str
) -> None:
    data = good.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text, body = data[8:end].decode(), data[end:]
    at = cut[0] % len(text)
    edited = frame((text[:at] + patch + text[at + cut[1] :]).encode("utf-8", "replace").decode(), body)
    assert_open_or_refused(good.with_name("fuzzed.gymdelta"), edited)


def assert_open_or_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        delta = DeltaFile.open(path, SPEC)
    except GymError:
        return
    with delta:
        assert all(bool(torch.isfinite(delta.decode(name)).all()) for name in delta.names)
