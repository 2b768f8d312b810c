"""Folders of AWQ and GPTQ as bases: what becomes of them, what trains on them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_fed.base.models import load_model, resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.export.formats.base import Options
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from tests.support import packed_weights as packers
from tests.support.adapters import logits, run, sibling

GROUP = 32
SECTIONS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with tied words whose layers have sizes for groups."""
    folder = tmp_path_factory.mktemp("plain") / "base"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    return sibling("Llama", folder, **sizes)


def packed(plain: Path, folder: Path, method: str, shards: int = 2) -> tuple[Path, dict[str, torch.Tensor]]:
    """``plain`` with packed layers in several files, and the weights that those stand for."""
    folder.mkdir()
    tensors, wanted = packers.packed_layers(load_file(plain / "model.safetensors"), method, GROUP)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "LICENSE").write_text("Apache-2.0")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SECTIONS[method]}))
    names, places = sorted(tensors), {}
    for shard in range(shards):
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / f"model-{shard}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(part, f"model-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder, wanted


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_packed_folder_is_loaded_as_the_plain_weights_it_stands_for(
    plain: Path,
    tmp_path: Path,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    folder, wanted = packed(plain, tmp_path / "packed", method)
    model = load_model(str(folder)).model
    found, same = model.state_dict(), load_model(str(plain)).model.state_dict()
    assert wanted
    assert all(torch.equal(found[name], value.float()) for name, value in wanted.items())
    assert all(torch.equal(found[name], same[name]) for name in same if name not in wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    said = " ".join(capsys.readouterr().err.split())
    assert f"{method} of 4 bits, dequantised" in said
    home = Path(resolve(str(folder)))
    assert capsys.readouterr().err == ""
    assert (home / "LICENSE").read_text() == "Apache-2.0"
    assert "quantization_config" not in json.loads((home / "config.json").read_text())


def test_lora_trains_on_a_packed_base_and_is_merged_into_its_plain_weights(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    folder, _ = packed(plain, tmp_path / "packed", "awq")
    run(tmp_path / "run", model=str(folder), max_steps=1)
    wanted = logits(tmp_path / "run")
    exact, usual = tmp_path / "exact", tmp_path / "usual"
    export(open_source(str(tmp_path / "run")), "huggingface", exact, Options(dtype="float32"), check=False)
    torch.testing.assert_close(logits(exact), wanted, rtol=0, atol=1e-5)
    # By default in the dtype of the packed layers' scales, whose rounding is all that may differ.
    export(open_source(str(tmp_path / "run")), "huggingface", usual, Options(), check=False)
    assert {value.dtype for value in load_file(usual / "model.safetensors").values()} == {torch.float16}
    rounding = torch.finfo(torch.float16).eps / 2 * float(wanted.abs().max())
    torch.testing.assert_close(logits(usual), wanted, rtol=0, atol=rounding)


def changed(folder: Path, drop: str = "", **added: torch.Tensor) -> None:
    """Take a tensor out of its file, and put others into the last."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(drop, None)
        if file.name == "model-1.safetensors":
            tensors |= added
        save_file(tensors, file, metadata={"format": "pt"})
    places.pop(drop, None)
    index.write_text(json.dumps({"weight_map": places | dict.fromkeys(added, "model-1.safetensors")}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: changed(it, "model.norm.weight"), "its weights lack 1 tensor of .*: model.norm.weight"),
        (lambda it: changed(it, other=torch.ones(2)), "LlamaForCausalLM does not have: other"),
        (
            lambda it: changed(it, "model.layers.0.mlp.up_proj.scales"),
            "tensor model.layers.0.mlp.up_proj.scales: is missing next to",
        ),
        (
            lambda it: changed(it, **{"model.layers.0.mlp.up_proj.qzeros": torch.ones(2, 2).int()}),
            r"model-\d.safetensors: tensor model.layers.0.mlp.up_proj.qzeros|qzeros lies in",
        ),
        (
            lambda it: (it / "model-1.safetensors").write_bytes(
                (it / "model-1.safetensors").read_bytes()[:-9]
            ),
            r"model-1.safetensors: cannot be read",
        ),
        (lambda it: (it / "model-1.safetensors").unlink(), "has no weights in model-1.safetensors"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_by_file_and_tensor(
    plain: Path, tmp_path: Path, change: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    folder, _ = packed(plain, tmp_path / "packed", "gptq")
    change(folder)
    with pytest.raises(GymError, match=says) as caught:
        load_model(str(folder))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert not [one for one in (tmp_path / "home").rglob("*") if one.suffix == ".safetensors"]


def test_a_note_of_an_import_in_the_folder_itself_is_not_taken_for_the_caches(
    plain: Path, tmp_path: Path
) -> None:
    folder, _ = packed(plain, tmp_path / "packed", "awq")
    (folder / "import.json").write_text(json.dumps({"sha256": "0" * 64, "padding": "x" * 5000}))
    made = Path(resolve(str(folder)))
    (made / "mark").touch()
    assert (Path(resolve(str(folder))) / "mark").is_file(), "it is imported once"
    assert json.loads((made / "import.json").read_text())["sha256"] == made.name


def test_a_setting_of_megabytes_is_refused_in_a_line(plain: Path, tmp_path: Path) -> None:
    for method, key in (("awq", "bits"), ("awq", "version"), ("gptq", "checkpoint_format")):
        folder, _ = packed(plain, tmp_path / f"{method}-{key}", method)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"][key] = "\x1b[2J\u202e" * 100_000
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(GymError, match=key) as raised:
            resolve(str(folder))
        assert len(raised.value.message) < 1000
        assert raised.value.message.isprintable()
