"""A packed base is packed once: later starts map its file, compute the same, and read no weights."""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gym_quant import huge_pages, packed_file
from gym_quant.kernels import dispatch, native
from gym_quant.linear import get_linear
from gym_quant.packed_file import open_packed, write_packed
from gym_quant.tiled_linear import TiledLinear

from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import GymError
from gym_fed.serving.base import load_base
from gym_fed.serving.forward import packed_base, trial
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.packed_base import BYTES_LIMIT, KEPT_FILES, PackedBase, Packer
from gym_fed.serving.forward.plain_model import PlainModel
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.setup import open_serving
from tests.unit.serving.test_decoder import build, texts
from tests.unit.serving.test_plain_model import saved


def rounds_activations() -> bool:
    """True if products with bfloat16 weights round activations."""
    return dispatch.path() == "avx512" and bool((native.features() or 0) & native.HAS_BF16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", "llama", "bfloat16")


def started(
    folder: Path, home: Path, format: str = "int8", *, plain: bool = True, limit: int = BYTES_LIMIT
) -> tuple[torch.Tensor, PackedBase]:
    """Logits of a text after a start, and the file that the start used."""
    model, _, base = load_base(str(folder), [], "bfloat16", plain=plain)
    kept = PackedBase(home, base.digest, "bfloat16", format, limit)
    with MultiVariantModel(model, base_format=format, packed_base=kept) as served:
        assert served.base_format == format
        logits = served.step([Chunk(ids, served.new_cache(), num_logits=9) for ids in texts(9)])
    return logits, kept


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_second_start_reads_what_the_first_packed(
    tmp_path: Path, folder: Path, format: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, kept = started(folder, tmp_path / "home", format, plain=plain)
    assert not kept.is_read
    assert [kept.path] == list((tmp_path / "home").iterdir())
    monkeypatch.setattr(packed_base.Packer, "__call__", None)  # nothing is packed again
    second, again = started(folder, tmp_path / "home", format, plain=plain)
    assert again.is_read
    assert torch.equal(first, second)


def test_a_start_from_the_file_reads_no_weight_that_is_packed(tmp_path: Path, folder: Path) -> None:
    wanted, _ = started(folder, tmp_path / "home")
    model, _, base = load_base(str(folder), [], "bfloat16", plain=True)
    assert type(model) is PlainModel
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.fill_(torch.nan)
    kept = PackedBase(tmp_path / "home", base.digest, "bfloat16", "int8")
    with MultiVariantModel(model, base_format="int8", packed_base=kept) as served:
        assert kept.is_read
        found = served.step([Chunk(ids, served.new_cache(), num_logits=9) for ids in texts(9)])
    assert torch.equal(found, wanted)


def changed(kept: PackedBase, layer: str) -> None:
    """Write a file with another layer of that name, whose digests are right."""
    file = open_packed(kept.path)
    narrow = get_linear("int8").pack(torch.ones(48, 48))
    write_packed(kept.path, {**file.tensors, layer: narrow}, file.metadata)


DAMAGE: dict[str, tuple[Callable[[PackedBase, bytes], object], str]] = {
    "cut": (lambda kept, whole: kept.path.write_bytes(whole[:-1]), "bytes of data, not the"),
    "empty": (lambda kept, _: kept.path.write_bytes(b""), "is truncated"),
    "no file of ours": (lambda kept, _: kept.path.write_bytes(b"x" * 4096), "over the limit"),
    "other base": (
        lambda kept, whole: kept.path.write_bytes(
            whole.replace(kept._labels["base"].encode(), b"sha256:" + b"0" * 64)
        ),
        "for a different base, dtype, format or layout",
    ),
    "a bit of a weight": (
        lambda kept, whole: kept.path.write_bytes(
            whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :]
        ),
        "its bytes have changed since they were written",
    ),
    "a layer of another shape": (
        lambda kept, _: changed(kept, "1.gate_up.0"),
        r"layer 1\.gate_up\.0 is \('int8', 48, 48\), not \('int8', 168, 48\)",
    ),
    "one layer more": (lambda kept, _: changed(kept, "9.down.0"), r"layer 9\.down\.0 is .*, not None"),
    "written by others": (lambda kept, _: kept.path.chmod(0o666), r"the file may be written by others \(mode 666\)"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_what_it_should_be_is_logged_and_written_anew(
    tmp_path: Path, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, kept = started(folder, tmp_path / "home")
    whole = kept.path.read_bytes()
    change, words = DAMAGE[damage]
    change(kept, whole)
    with caplog.at_level(logging.WARNING):
        found, again = started(folder, tmp_path / "home")
    assert not again.is_read
    assert re.search(f"{re.escape(str(kept.path))}: packing again: .*{words}", caplog.text)
    assert torch.equal(found, wanted)
    assert kept.path.read_bytes() == whole
    assert kept.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    tmp_path: Path, folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, kept = started(folder, tmp_path / "home")
    whole = kept.path.read_bytes()
    (tmp_path / "home").chmod(mode)
    kept.path.write_bytes(whole[:-1])
    with caplog.at_level(logging.WARNING):
        found, again = started(folder, tmp_path / "home")
    assert not again.is_read
    assert f"{kept.path}: packing again: the folder may be written by others (mode {mode:o})" in caplog.text
    assert f"{kept.path}: the packed base was not saved" in caplog.text
    assert torch.equal(found, wanted)
    assert kept.path.read_bytes() == whole[:-1]


def test_a_file_of_another_user_is_not_read(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(folder, tmp_path / "home")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with caplog.at_level(logging.WARNING):
        _, again = started(folder, tmp_path / "home")
    assert not again.is_read
    assert f"belongs to user {own}, not to {own + 1}" in caplog.text


@pytest.mark.parametrize("plain", [True, False])
def test_packed_weights_that_compute_other_logits_than_recorded_are_refused(
    tmp_path: Path, folder: Path, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kept = started(folder, tmp_path / "home")
    right = TiledLinear.multiply

    def doubled(self: TiledLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        right(self, x, y)
        if self.format == "int8" and self.cols == 84:
            y *= 2

    monkeypatch.setattr(TiledLinear, "multiply", doubled)
    with pytest.raises(GymError, match="from those recorded in its file, are off by") as error:
        started(folder, tmp_path / "home", plain=plain)
    assert f"delete {kept.path}" in str(error.value.hint)


@pytest.mark.parametrize(("format", "share"), [("bfloat16", 1.1), ("int8", 1.1), ("int4", 1.1)])
@pytest.mark.parametrize("plain", [True, False])
def test_a_packed_product_that_is_not_that_of_the_weights_is_refused_at_the_first_start(
    folder: Path, format: str, share: float, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = load_base(str(folder), [], "bfloat16", plain=plain)
    right = TiledLinear.multiply

    def off(self: TiledLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        right(self, x, y)
        if self.cols == 84:
            y *= share

    monkeypatch.setattr(TiledLinear, "multiply", off)
    with pytest.raises(GymError, match=f"logits in packed {format}.* are off by"):
        MultiVariantModel(model, base_format=format)


@pytest.mark.skipif(
    not rounds_activations(),
    reason="this processor has no products of bfloat16 (AVX-512 BF16), or they are off",
)
def test_products_of_bfloat16_that_are_not_those_of_float32_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = load_base(str(folder), [], "bfloat16", plain=True)
    right = TiledLinear.multiply

    def off(self: TiledLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        right(self, x, y)
        if rounds_activations():
            y *= 1.5

    monkeypatch.setattr(TiledLinear, "multiply", off)
    with pytest.raises(GymError, match="logits in products of bfloat16 are off by"):
        MultiVariantModel(model, base_format="bfloat16")


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or dispatch.path() == "torch",
    reason="huge pages are Linux's, for the kernels' tiles",
)
def test_a_base_is_packed_in_huge_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = load_base(str(folder), [], "bfloat16", plain=True)
    right, tiles = huge_pages.empty, []

    def recorded(*arguments: Any) -> torch.Tensor:
        tiles.append(right(*arguments))
        return tiles[-1]

    monkeypatch.setattr(huge_pages, "empty", recorded)
    with MultiVariantModel(model, base_format="bfloat16"):
        chunks = {tensor.untyped_storage().data_ptr() for tensor in tiles}
    assert len(chunks) == 1 < len(tiles)


@pytest.mark.parametrize("alone", [True, False])
def test_a_product_that_is_wrong_for_one_row_or_for_several_is_refused(
    folder: Path, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = load_base(str(folder), [], "bfloat16", plain=True)
    right = TiledLinear.multiply

    def off(self: TiledLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        right(self, x, y)
        if (len(x) == 1) == alone:
            y *= 1.1

    monkeypatch.setattr(TiledLinear, "multiply", off)
    with pytest.raises(GymError, match="logits in packed bfloat16 are off by"):
        MultiVariantModel(model, base_format="bfloat16")


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_packed_weights_that_are_not_the_base_s_are_refused_at_the_first_start(
    folder: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = load_base(str(folder), [], "bfloat16", plain=True)
    right = Packer()
    monkeypatch.setattr(
        trial,
        "Packer",
        lambda: lambda name, format, weights: right(name, format, [-weight for weight in weights]),
    )
    with pytest.raises(GymError, match=f"logits in packed {format} are off by .*over 0") as error:
        MultiVariantModel(model, base_format=format)
    assert error.value.hint == "choose another base_format"


def test_a_disk_that_takes_no_file_is_logged_and_the_base_is_served(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        logits, kept = started(folder, tmp_path / "home")
    assert bool(torch.isfinite(logits).all())
    assert f"{kept.path}: the packed base was not saved" in caplog.text


def test_a_file_that_cannot_be_touched_is_read(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(folder, tmp_path / "home")

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    _, again = started(folder, tmp_path / "home")
    assert again.is_read


def test_a_name_that_no_file_can_hold_is_logged_and_the_base_is_served(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_file, "MAX_HEADER_BYTES", 64)
    with caplog.at_level(logging.WARNING):
        logits, kept = started(folder, tmp_path / "home")
    assert bool(torch.isfinite(logits).all())
    assert f"{kept.path}: the packed base was not saved" in caplog.text
    assert list((tmp_path / "home").iterdir()) == []


def test_what_a_killed_start_left_is_removed(tmp_path: Path, folder: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(0o700)
    left = home / ".other-int8-1.safetensors.abc.part"
    left.mkdir()
    (left / "other-int8-1.safetensors.77.part").write_bytes(b"x" * 100)
    _, kept = started(folder, home)
    assert list(home.iterdir()) == [kept.path]


@pytest.mark.parametrize(("free", "limit", "words"), [
    (10, 10**9, "bytes must be free, but only 10 are"),
    (10**12, 1000, "more than packed_size (1,000)"),
])  # fmt: skip
def test_a_file_for_which_there_is_no_room_is_not_written(
    tmp_path: Path,
    folder: Path,
    free: int,
    limit: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with caplog.at_level(logging.WARNING):
        started(folder, tmp_path / "home", limit=limit)
    assert words in caplog.text
    assert list((tmp_path / "home").iterdir()) == []


def test_the_bytes_are_logged_before_they_are_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged = []

    def write(*arguments: Any) -> None:
        logged.append(caplog.text)
        write_packed(*arguments)

    monkeypatch.setattr(packed_base, "write_packed", write)
    with caplog.at_level(logging.WARNING):
        _, kept = started(folder, tmp_path / "home")
    assert f"writing the packed base to {kept.path}" in logged[0]
    assert logged[0] == caplog.text, "success is no warning"


def test_files_beyond_the_bytes_that_there_may_be_go_oldest_first(tmp_path: Path, folder: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(0o700)
    for age, name in enumerate(("new", "old")):
        (home / f"{name}.safetensors").write_bytes(b"x" * 40_000)
        os.utime(home / f"{name}.safetensors", (100 - age, 100 - age))
    _, kept = started(folder, home, limit=180_000)
    size = kept.path.stat().st_size
    assert 110_000 < size < 135_000
    assert sorted(home.iterdir()) == sorted([kept.path, home / "new.safetensors"])


def test_only_the_files_that_were_used_last_are_kept(tmp_path: Path, folder: Path) -> None:
    home = tmp_path / "home"
    _, kept = started(folder, home)
    os.utime(kept.path, (1, 1))
    others = []
    for number in range(KEPT_FILES):
        other = PackedBase(home, f"sha256:{str(number) * 64}", "bfloat16", "int8")
        other.pack("head", "bfloat16", [torch.ones(32, 16)])
        if number == KEPT_FILES - 1:
            assert started(folder, home)[1].is_read  # which uses it
        other.save(torch.ones(3, 7))
        os.utime(other.path, (2 + number, 2 + number))
        others.append(other.path)
    assert sorted(home.iterdir()) == sorted([kept.path, *others[1:]])


def test_a_server_keeps_its_packed_base_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    answers: list[Any] = []
    files = []
    for _ in range(2):
        with open_serving(ServingConfig(base="gym-nano", variants=None, base_format="int8")) as serving:
            asked = {"model": serving.served_name, "prompt": "abc", "max_tokens": 8, "temperature": 0}
            answers.append(serving.service.handle("/v1/completions", asked, LOCAL)["choices"])
        files.append([(file.name, file.stat().st_ino) for file in (tmp_path / "packed").iterdir()])
    assert len(files[0]) == 1
    assert "-float32-int8-" in files[0][0][0]
    assert files[0] == files[1], "the second start maps the first one's file"
    assert answers[0] == answers[1]


def test_a_server_without_disk_space_for_packed_bases_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    with open_serving(
        ServingConfig(base="gym-nano", variants=None, base_format="int8", packed_size=0)
    ) as serving:
        assert serving.served.base_format == "int8"
    assert not (tmp_path / "packed").exists()


def test_a_transformers_model_with_no_file_is_packed_as_before(tmp_path: Path) -> None:
    with MultiVariantModel(build("llama"), base_format="int8") as served:
        assert served.packed


def test_weights_are_joined_in_one_buffer_that_no_packed_layer_lies_in() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, 64, generator=generator).to(torch.bfloat16) for rows in (32, 64, 32)]
    packer = packed_base.Packer()
    first = packer("a", "bfloat16", weights[:2])
    second = packer("b", "bfloat16", weights[1:])
    alone = packer("c", "bfloat16", weights[:1])
    assert torch.equal(first.decode_block(0, 96), torch.cat(weights[:2]).float())
    assert torch.equal(second.decode_block(0, 96), torch.cat(weights[1:]).float())
    assert torch.equal(alone.decode_block(0, 32), weights[0].float())
