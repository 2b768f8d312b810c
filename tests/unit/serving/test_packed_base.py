"""A base that is packed is packed once: later starts map its file, compute the same, and read none of its weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.base import load_base
from gym_fed.serving.forward import packed_base
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.forward.packed_base import KEPT_FILES, PackedBase
from gym_fed.serving.forward.plain_model import PlainModel
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.setup import open_serving
from tests.unit.serving.test_decoder import build, texts
from tests.unit.serving.test_plain_model import saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", "llama", "bfloat16")


def started(
    folder: Path, home: Path, format: str = "int8", *, plain: bool = True
) -> tuple[torch.Tensor, PackedBase]:
    """Logits of a text after a start, and the file that the start used."""
    model, _, base = load_base(str(folder), [], "bfloat16", plain=plain)
    kept = PackedBase(home, base.digest, "bfloat16", format)
    with MultiVariantModel(model, base_format=format, packed_base=kept) as served:
        assert served.base_format == format
        logits = served.step([Chunk(ids, served.new_cache(), num_logits=9) for ids in texts(9)])
    return logits, kept


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_second_start_maps_what_the_first_packed(
    tmp_path: Path, folder: Path, format: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, kept = started(folder, tmp_path / "home", format, plain=plain)
    assert not kept.is_mapped
    assert [kept.path] == list((tmp_path / "home").iterdir())
    monkeypatch.setattr(packed_base.Packer, "__call__", None)  # nothing is packed again
    second, again = started(folder, tmp_path / "home", format, plain=plain)
    assert again.is_mapped
    assert torch.equal(first, second)


def test_a_mapped_start_reads_no_weight_that_is_packed(tmp_path: Path, folder: Path) -> None:
    wanted, _ = started(folder, tmp_path / "home")
    model, _, base = load_base(str(folder), [], "bfloat16", plain=True)
    assert type(model) is PlainModel
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.fill_(torch.nan)
    kept = PackedBase(tmp_path / "home", base.digest, "bfloat16", "int8")
    with MultiVariantModel(model, base_format="int8", packed_base=kept) as served:
        found = served.step([Chunk(ids, served.new_cache(), num_logits=9) for ids in texts(9)])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("damage", ["cut", "empty", "other base", "no file of ours"])
def test_a_file_that_is_not_what_it_should_be_is_logged_and_written_anew(
    tmp_path: Path, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, kept = started(folder, tmp_path / "home")
    whole = kept.path.read_bytes()
    if damage == "other base":
        PackedBase(tmp_path / "home", "sha256:" + "0" * 64, "bfloat16", "int8")
        kept.path.write_bytes(whole.replace(kept._labels["base"].encode(), b"sha256:" + b"0" * 64))
    else:
        kept.path.write_bytes({"cut": whole[:-1], "empty": b"", "no file of ours": b"x" * 4096}[damage])
    with caplog.at_level(logging.WARNING):
        found, again = started(folder, tmp_path / "home")
    assert not again.is_mapped
    assert "is packed anew" in caplog.text
    assert str(kept.path) in caplog.text
    assert torch.equal(found, wanted)
    assert kept.path.read_bytes() == whole


def test_a_disk_that_takes_no_file_is_logged_and_the_base_is_served(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        logits, kept = started(folder, tmp_path / "home")
    assert bool(torch.isfinite(logits).all())
    assert f"{kept.path}: the packed base is not kept" in caplog.text


def test_only_the_files_that_were_used_last_are_kept(tmp_path: Path, folder: Path) -> None:
    home = tmp_path / "home"
    _, kept = started(folder, home)
    os.utime(kept.path, (1, 1))
    others = []
    for number in range(KEPT_FILES):
        other = PackedBase(home, f"sha256:{str(number) * 64}", "bfloat16", "int8")
        other.pack("head", "bfloat16", [torch.ones(32, 16)])
        if number == KEPT_FILES - 1:
            PackedBase(home, *(kept._labels[key] for key in ("base", "dtype", "format")))  # a start uses it
        other.save()
        os.utime(other.path, (2 + number, 2 + number))
        others.append(other.path)
    assert sorted(home.iterdir()) == sorted([kept.path, *others[1:]])


def test_a_server_keeps_its_packed_base_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    answers: list[Any] = []
    for _ in range(2):
        with open_serving(ServingConfig(base="gym-nano", variants=None, base_format="int8")) as serving:
            asked = {"model": serving.served_name, "prompt": "abc", "max_tokens": 8, "temperature": 0}
            answers.append(serving.service.handle("/v1/completions", asked, LOCAL)["choices"])
    assert len(list((tmp_path / "packed").glob("*-float32-int8-*.safetensors"))) == 1
    assert answers[0] == answers[1]


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
