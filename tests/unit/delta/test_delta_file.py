"""Writing and reading a delta: the same bytes every time, mapped, one tensor at a time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gym_quant import get_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta

names = st.text(
    st.characters(categories=["L", "N", "P", "Zs"], include_characters=".*"), min_size=1, max_size=12
)
name_sets = st.one_of(
    st.sets(names, min_size=1, max_size=6),
    st.sets(st.builds("h.{}.{}".format, st.integers(0, 12), st.sampled_from(["q", "1.k", "*"])), max_size=20),
)


def spec_of(shapes: Mapping[str, tuple[int, ...]]) -> BaseSpec:
    return BaseSpec("tiny", "sha256:" + "0" * 64, dict(shapes))


@given(chosen=name_sets, extra=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
@settings(max_examples=60)
def test_any_names_come_back(chosen: set[str], extra: dict[str, str], tmp_path: Path) -> None:
    shapes = {name: (len(name), 3) for name in chosen if name.isprintable()}
    entries = [DeltaEntry.of(name, torch.full(shape, 1.0)) for name, shape in shapes.items()]
    info = write_delta(tmp_path / "d.gymdelta", entries, spec_of(shapes), extra)
    with DeltaFile.open(tmp_path / "d.gymdelta", spec_of(shapes)) as delta:
        assert delta.names == tuple(sorted(shapes))
        assert delta.manifest.extra == extra
        assert delta.sha256() == info.sha256
        assert delta.size_bytes == info.size_bytes == os.path.getsize(tmp_path / "d.gymdelta")
        assert all(torch.equal(delta.decode(name), torch.ones(shape)) for name, shape in shapes.items())


def test_the_order_of_entries_does_not_change_a_byte(tmp_path: Path) -> None:
    shapes = {"b": (3, 5), "a": (4, 4), "c": (7,)}
    entries = [
        DeltaEntry.of(name, torch.arange(torch.Size(s).numel()).reshape(s) - 3.0)
        for name, s in shapes.items()
    ]
    first = write_delta(tmp_path / "1.gymdelta", entries, spec_of(shapes))
    second = write_delta(tmp_path / "2.gymdelta", reversed(entries), spec_of(shapes))
    assert first == second
    assert first.sha256 == hashlib.sha256((tmp_path / "2.gymdelta").read_bytes()).hexdigest()


def test_norms_are_those_of_what_is_decoded(tmp_path: Path) -> None:
    shapes = {"a": (16, 172), "b": (9,), "c": (16, 172)}
    random = {
        name: torch.randn(s, generator=torch.Generator().manual_seed(len(s))) for name, s in shapes.items()
    }
    entries = [
        DeltaEntry.of("a", random["a"], group_size=64),
        DeltaEntry.of("b", random["b"], "dense"),
        DeltaEntry.of("c", random["c"], "lora", rank=3),
    ]
    write_delta(tmp_path / "d.gymdelta", entries, spec_of(shapes))
    with DeltaFile.open(tmp_path / "d.gymdelta") as delta:
        squares = 0.0
        for name in shapes:
            exact = float(delta.decode(name).double().norm())
            assert delta.tensor_norm(name) == pytest.approx(exact, rel=1e-6)
            squares += exact**2
        assert delta.norm() == pytest.approx(squares**0.5, rel=1e-6)


def test_bits_per_weight_count_the_header_and_the_tensors_left_out(tmp_path: Path) -> None:
    shapes = {"a": (16, 172), "b": (16, 172)}
    write_delta(tmp_path / "d.gymdelta", [DeltaEntry.of("a", torch.ones(16, 172))], spec_of(shapes))
    size = os.path.getsize(tmp_path / "d.gymdelta")
    with DeltaFile.open(tmp_path / "d.gymdelta", spec_of(shapes)) as delta:
        assert delta.bits_per_weight == size * 8 / (2 * 16 * 172)
    with DeltaFile.open(tmp_path / "d.gymdelta") as delta:
        assert delta.bits_per_weight == size * 8 / (16 * 172)


def test_nothing_can_be_read_after_closing(tmp_path: Path) -> None:
    shapes = {"a": (2, 2)}
    write_delta(tmp_path / "d.gymdelta", [DeltaEntry.of("a", torch.ones(2, 2))], spec_of(shapes))
    with DeltaFile.open(tmp_path / "d.gymdelta") as delta:
        held = delta.payload("a")
    with pytest.raises(GymError, match="is closed"):
        delta.decode("a")
    assert held["scales"].tolist() == [1.0]


def test_reading_never_changes_the_file(tmp_path: Path) -> None:
    shapes = {"a": (2, 2)}
    info = write_delta(
        tmp_path / "d.gymdelta", [DeltaEntry.of("a", torch.ones(2, 2), "dense")], spec_of(shapes)
    )
    with DeltaFile.open(tmp_path / "d.gymdelta") as delta:
        delta.decode("a").fill_(7.0)
        delta.payload("a")["values"].fill_(7.0)
    with DeltaFile.open(tmp_path / "d.gymdelta") as delta:
        assert delta.sha256() == info.sha256


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    shapes = {"a": (2, 2), "b": (2, 2)}
    path = tmp_path / "d.gymdelta"
    write_delta(path, [DeltaEntry.of("a", torch.ones(2, 2))], spec_of(shapes))
    before = path.read_bytes()
    wrong = get_codec("bitdelta").encode(torch.ones(3, 3)).payload
    with pytest.raises(GymError, match="tensor 'b': payload 'bits' is not") as caught:
        write_delta(path, [DeltaEntry("b", (2, 2), "bitdelta", {}, lambda: wrong)], spec_of(shapes))
    assert caught.value.code is ErrorCode.DELTA_INVALID
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["d.gymdelta"]


def test_a_tensor_the_base_has_in_another_shape_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(GymError, match=r"tensor 'a': shape \[2, 2\] is not the base's"):
        write_delta(tmp_path / "d", [DeltaEntry.of("a", torch.ones(2, 2))], spec_of({"a": (4, 4)}))


def test_the_same_tensor_twice_is_not_written(tmp_path: Path) -> None:
    entry = DeltaEntry.of("a", torch.ones(2, 2))
    with pytest.raises(GymError, match="tensor 'a' is listed twice"):
        write_delta(tmp_path / "d", [entry, entry], spec_of({"a": (2, 2)}))


_MEMORY = """
import resource, sys, torch
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
path, spec = sys.argv[1], BaseSpec("big", "sha256:" + "0" * 64, {f"t{i}": (1024, 2048) for i in range(8)})
def entries():
    for name in spec.shapes:
        yield DeltaEntry(name, (1024, 2048), "dense", {"dtype": "float32"},
                         lambda: {"values": torch.full((1024, 2048), 0.5)})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
write_delta(path, list(entries())[:1], spec)
DeltaFile.open(path, spec).close()
before = peak()
write_delta(path, entries(), spec)
with DeltaFile.open(path, spec) as delta:
    assert delta.size_bytes > 64 << 20 and delta.norm() > 0
    delta.sha256()
print(peak() - before)
"""


def test_writing_and_checking_64_mib_takes_the_memory_of_a_few_tensors(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path / "big.gymdelta")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) < 40, f"grew by {run.stdout.strip()} MiB"
