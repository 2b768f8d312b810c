"""A trained model is merged with others' work, and written as a model, an adapter or a delta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.quantization import AggregationMethod, DeltaSoupConfig
from gym_fed.training.model.saving import _move_into

ROWS = generate("copy", 40)
MEAN = DeltaSoupConfig(
    method=AggregationMethod.MEAN, codec={"codec": "dense", "dense_dtype": "float32", "error_feedback": False}
)


def trained(base: Path, folder: Path, **changes: Any) -> Trainer:
    settings = {
        "model": str(base),
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    trainer = Trainer(TrainingConfig(**{**settings, **changes}))
    trainer.train(ROWS)
    return trainer


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([[5, 6, 7, 8]])).logits
    return out


def test_the_soup_of_two_is_their_mean_and_becomes_the_result(tiny_base: Path, tmp_path: Path) -> None:
    mine, yours = (trained(tiny_base, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert mine.result is not None
    assert yours.result is not None
    before = [{k: v.clone() for k, v in t.result.model.state_dict().items()} for t in (mine, yours)]
    soup = mine.apply_deltasoup({"you": yours.result.model}, MEAN)
    assert soup.merged == ("self", "you")
    after = mine.result.model.state_dict()
    for name, value in after.items():
        torch.testing.assert_close(value, (before[0][name] + before[1][name]) / 2, atol=1e-2, rtol=1e-2)
    moved = max((after[name] - before[0][name]).abs().max().item() for name in after)
    assert moved > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"finetuning": "lora"},
        {"finetuning": "lora", "lora": {"use_dora": True}},
        {"finetuning": "oft", "oft": {"oft_block_size": 4}},
    ],
    ids=["full", "lora", "dora", "oft"],
)
def test_what_is_exported_computes_what_was_trained(
    tiny_base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = trained(tiny_base, tmp_path / "run", **changes)
    assert trainer.result is not None
    wanted = logits(trainer.result.model)
    folder = trainer.export(tmp_path / "whole", check=False)
    torch.testing.assert_close(logits(load_model(str(folder)).model), wanted, atol=1e-4, rtol=1e-4)
    exact = {"codec": "dense", "dense_dtype": "float32", "factors": "float32", "error_feedback": False}
    from gym_fed.config.delta import CodecPolicy

    delta = trainer.export(tmp_path / "mine.gymdelta", "delta", CodecPolicy(**exact), check=False)
    base = load_model(str(tiny_base)).model
    with DeltaFile.open(delta, BaseSpec.of(base, "base")) as opened:
        apply_delta(base, opened)
    torch.testing.assert_close(logits(base), wanted, atol=1e-4, rtol=1e-4)
    if changes:
        adapter = trainer.export(tmp_path / "adapter", "adapter", check=False)
        torch.testing.assert_close(logits(load_model(str(adapter)).model), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(trainer.result.model), wanted)


@pytest.mark.parametrize(
    "lora", [{}, {"init_lora_weights": "loftq"}, {"use_dora": True}], ids=["lora", "loftq", "dora"]
)
def test_from_a_base_in_few_bits_the_adapter_goes_onto_the_base_that_everybody_has(
    tiny_base: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    pytest.importorskip("bitsandbytes")
    from gym_fed.config.delta import CodecPolicy

    trainer = trained(tiny_base, tmp_path / "run", finetuning="lora", lora=lora, quantization={"bits": 4})
    wanted = logits(load_model(str(trainer.export(tmp_path / "adapter", "adapter", check=False))).model)
    whole = load_model(str(trainer.export(tmp_path / "whole", check=False))).model
    torch.testing.assert_close(logits(whole), wanted, atol=1e-4, rtol=1e-4)
    exact = CodecPolicy(codec="dense", dense_dtype="float32", factors="float32", error_feedback=False)
    delta = trainer.export(tmp_path / "mine.gymdelta", "delta", exact, check=False)
    base = load_model(str(tiny_base)).model
    assert (logits(base) - wanted).abs().max() > 1e-2
    with DeltaFile.open(delta, BaseSpec.of(base, "base")) as opened:
        apply_delta(base, opened)
    torch.testing.assert_close(logits(base), wanted, atol=1e-4, rtol=1e-4)
    trainer.apply_deltasoup({}, MEAN)
    assert trainer.result is not None
    torch.testing.assert_close(logits(trainer.result.model), wanted, atol=5e-2, rtol=5e-2)


def test_an_adapter_of_scaled_positions_says_so_and_finds_its_base_from_anywhere(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_base.parent)
    scaled = {"rope_scaling": {"type": "linear", "factor": 4}}
    trainer = trained(Path(tiny_base.name), tmp_path / "run", finetuning="lora", **scaled)
    assert trainer.result is not None
    wanted = logits(trainer.result.model)
    adapter = trainer.export(tmp_path / "adapter", "adapter", check=False)
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(logits(load_model(str(adapter)).model), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(
        GymError, match="a delta holds only differences of weights, so the scaling would be lost"
    ):
        trainer.export(tmp_path / "mine.gymdelta", "delta", check=False)
    with pytest.raises(GymError, match="a soup contains only weight differences"):
        trainer.apply_deltasoup({}, MEAN)


def test_what_went_on_from_an_adapter_is_held_against_the_adapter_merged_in(
    tiny_base: Path, tmp_path: Path
) -> None:
    from gym_fed.config.delta import CodecPolicy

    trained(tiny_base, tmp_path / "first", finetuning="lora", save_final=True)
    trainer = trained(tmp_path / "first", tmp_path / "second")
    assert trainer.result is not None
    wanted = logits(trainer.result.model)
    exact = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
    delta = trainer.export(tmp_path / "mine.gymdelta", "delta", exact, check=False)
    base = load_model(str(tmp_path / "first")).model.merge_and_unload()
    with DeltaFile.open(delta, BaseSpec.of(base, "base")) as opened:
        apply_delta(base, opened)
    torch.testing.assert_close(logits(base), wanted, atol=1e-4, rtol=1e-4)
    assert trainer.apply_deltasoup({}, MEAN).merged == ("self",)


def test_save_dtype_is_the_type_of_whatever_is_written(tiny_base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = trained(tiny_base, tmp_path / "run", finetuning="lora", save_dtype="bfloat16", save_final=True)
    written = [
        tmp_path / "run",
        trainer.export(tmp_path / "adapter", "adapter", check=False),
        trainer.export(tmp_path / "out", check=False),
    ]
    for folder in written:
        (file,) = folder.glob("*.safetensors")
        assert {value.dtype for value in load_file(file).values()} == {torch.bfloat16}, folder
    assert trainer.result is not None
    kept = {value.dtype for value in trainer.result.model.parameters()}
    assert kept == {torch.float32}
    loaded = load_model(str(tmp_path / "run")).model
    torch.testing.assert_close(logits(loaded), logits(trainer.result.model), atol=2e-2, rtol=2e-2)


def test_a_save_that_was_killed_half_way_is_done_again(tmp_path: Path) -> None:
    for name, words in (("run", "old"), ("part", "new")):
        (tmp_path / name / "critic").mkdir(parents=True)
        (tmp_path / name / "critic/config.json").write_text(words)
        (tmp_path / name / "config.json").write_text(words)
    (tmp_path / "run/critic/left.json").write_text("old")
    _move_into(tmp_path / "part", tmp_path / "run")
    found = {str(f.relative_to(tmp_path)): f.read_text() for f in tmp_path.rglob("*.json")}
    assert found == {"run/critic/config.json": "new", "run/config.json": "new"}
    assert not (tmp_path / "part").exists()


def test_an_export_that_fails_half_way_leaves_no_folder_of_that_name(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(tiny_base, tmp_path / "run")
    assert trainer.result is not None

    def fail(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(trainer.result.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk"):
        trainer.export(tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert load_model(str(trainer.export(tmp_path / "out", check=False))).tokenizer is not None


def test_refusals_name_what_is_missing(tiny_base: Path, tmp_path: Path) -> None:
    untrained = Trainer(TrainingConfig(model=str(tiny_base), output_dir=tmp_path / "never"))
    with pytest.raises(GymError, match="nothing has been trained yet"):
        untrained.export(tmp_path / "out")
    trainer = trained(tiny_base, tmp_path / "run")
    with pytest.raises(GymError, match="has no adapter"):
        trainer.export(tmp_path / "out", "adapter", check=False)
    with pytest.raises(GymError, match="format zip is unknown"):
        trainer.export(tmp_path / "out", "zip", check=False)
    (tmp_path / "out").mkdir()
    with pytest.raises(GymError) as caught:
        trainer.export(tmp_path / "out", check=False)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    with pytest.raises(GymError, match="'self' is reserved for this trainer's own result"):
        trainer.apply_deltasoup({"self": "x.gymdelta"})
