"""The trainer on a tiny model: deterministic, resumable to the bit, in memory or on disk, and silent to the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import lora_factors

ROWS = generate("copy", 60)


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "logging_steps": 2,
    }
    return TrainingConfig(**{**values, **changes})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def train(tiny_base: Path, settings: TrainingConfig, **hooks: Any) -> Any:
    loaded = load_model(str(tiny_base))
    return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(ROWS)


def test_a_model_in_memory_is_trained_in_place_and_left_clean(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    before = weights(loaded.model)
    steps: list[tuple[int, int]] = []
    result = Trainer(
        config(tmp_path / "run", save_final=False),
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        on_step=lambda step, total, loss: steps.append((step, total)),
    ).train(ROWS)
    assert result.model is loaded.model
    assert not torch.equal(before["model.norm.weight"], loaded.model.state_dict()["model.norm.weight"])
    assert steps == [(i, 6) for i in range(1, 7)]
    assert (result.steps, len(result.losses), result.num_examples) == (6, 6, 60)
    assert result.final_loss == pytest.approx(sum(result.losses[-2:]) / 2)
    assert result.num_tokens > 0
    assert "forward" not in vars(loaded.model), "TRL's patch is still on the model"
    assert not loaded.model.training
    assert all(p.grad is None for p in loaded.model.parameters())
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_the_same_config_gives_the_same_weights_and_another_seed_others(
    tiny_base: Path, tmp_path: Path
) -> None:
    runs = [train(tiny_base, config(tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1))]
    assert runs[0].losses == runs[1].losses != runs[2].losses
    assert_same(weights(runs[0].model), weights(runs[1].model))
    saved = [(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(3)]
    assert saved[0] == saved[1] != saved[2]


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_a_stopped_run_resumes_to_the_same_bits(tiny_base: Path, tmp_path: Path, finetuning: str) -> None:
    changes = {"finetuning": finetuning, "save_final": False}
    whole = train(tiny_base, config(tmp_path / "whole", **changes))
    seen: list[int] = []
    part = config(tmp_path / "part", **changes)
    with pytest.raises(GymError, match="stopped at step 3 of 6") as caught:
        train(
            tiny_base,
            part,
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 3,
        )
    assert caught.value.code is ErrorCode.INTERRUPTED
    assert f"gym train {tmp_path / 'part' / 'config.yaml'}" in caught.value.hint
    resumed = train(tiny_base, part)
    assert resumed.losses == whole.losses
    assert resumed.num_tokens == whole.num_tokens
    assert_same(weights(whole.model), weights(resumed.model))
    assert (tmp_path / "part/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_a_run_that_had_ended_without_saving_its_model_gives_it_again(
    tiny_base: Path, tmp_path: Path
) -> None:
    settings = config(tmp_path / "run", save_final=False, save_steps=3)
    first = train(tiny_base, settings)
    again = train(tiny_base, settings)
    assert again.losses == first.losses
    assert_same(weights(first.model), weights(again.model))


def test_what_lies_in_output_dir_is_never_overwritten_silently(tiny_base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = config(folder, save_steps=3)
    train(tiny_base, settings)
    with pytest.raises(GymError, match="holds a finished run") as caught:
        train(tiny_base, settings)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    (folder / "result.json").unlink()
    with pytest.raises(GymError, match=r"a different config: learning_rate was 0.01 and is now 0.5"):
        train(tiny_base, config(folder, save_steps=3, learning_rate=0.5))
    loaded = load_model(str(tiny_base))
    other = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer)
    with pytest.raises(GymError, match="on different data"):
        other.train(generate("copy", 60, seed=1))
    with pytest.raises(GymError, match="unfinished run"):
        other.train(ROWS, resume=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("do not touch")
    with pytest.raises(GymError, match="is not empty"):
        train(tiny_base, config(tmp_path / "mine"))
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_model_in_memory_is_not_said_to_be_of_another_type(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="dtype: bfloat16 is set, but the model in memory is float32"):
        train(tiny_base, config(tmp_path / "run", dtype="bfloat16"))
    assert not (tmp_path / "run").exists()


def test_what_the_model_refuses_is_reported_before_anything_is_written_and_corrected_with_the_same_model(
    tiny_base: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_base))
    rope = (loaded.model.config.rope_parameters, loaded.model.config.max_position_embeddings)
    changes: dict[str, Any] = {"rope_scaling": {"type": "linear", "factor": 2.0}, "finetuning": "lora"}

    def run(**lora: Any) -> Any:
        settings = config(tmp_path / "run", **changes, lora=lora, max_steps=1)
        return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)

    with pytest.raises(GymError, match="nope"):
        run(target_modules=["nope"])
    assert not (tmp_path / "run").exists()
    assert (loaded.model.config.rope_parameters, loaded.model.config.max_position_embeddings) == rope
    assert run().model.config.rope_parameters["factor"] == 2.0


def test_a_run_in_which_nothing_was_learnt_gives_way_to_another_config(tmp_path: Path) -> None:
    def begin(digest: str = "digest", **changes: Any) -> None:
        folder = RunFolder(tmp_path / "run")
        try:
            folder.open(config(tmp_path / "run", model="gym-nano", **changes), digest, resume=True)
        finally:
            folder.close()

    begin()
    (tmp_path / "run/environment.json").write_text("{}")
    begin("other", learning_rate=0.5)
    assert not (tmp_path / "run/environment.json").exists()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(GymError, match=r"a different config: learning_rate was 0.5 and is now 0.01"):
        begin("other")
    with pytest.raises(GymError, match="on different data"):
        begin(learning_rate=0.5)
    with pytest.raises(
        GymError, match="finetuning was 'full' and is now 'lora', lora was None and is now a section "
    ):
        begin("other", learning_rate=0.5, finetuning="lora")
    with pytest.raises(GymError, match=r"config: reproducibility\.deterministic was False and is now True "):
        begin("other", learning_rate=0.5, reproducibility={"deterministic": True})


def test_no_rows_and_other_held_out_rows_are_refused(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    settings = config(tmp_path / "run", eval_steps=2)

    def run(rows: Any, held_out: Any, **hooks: Any) -> Any:
        trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks)
        return trainer.train(rows, held_out)

    for rows, held_out, name in (([], None, "data"), (ROWS, [], "eval_data")):
        with pytest.raises(GymError, match=f"{name} contains no rows"):
            run(rows, held_out)
    assert not (tmp_path / "run").exists()
    with pytest.raises(GymError, match="stopped at step 1"):
        run(ROWS[:8], ROWS[8:10], should_stop=lambda: True)
    with pytest.raises(GymError, match="with different held-out rows"):
        run(ROWS[:8], ROWS[10:12])
    with pytest.raises(GymError, match="on different data"):
        run(ROWS[12:20], ROWS[8:10])
    assert run(ROWS[:8], ROWS[8:10]).steps == settings.max_steps


def test_lora_leaves_the_base_alone_and_its_factors_are_the_whole_difference(
    tiny_base: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_base))
    before = weights(loaded.model)
    settings = config(tmp_path / "run", finetuning="lora", model=str(tiny_base))
    result = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
    factors = lora_factors(result.model)
    assert factors.keys() <= before.keys()
    assert len(factors) == 7
    merged = dict(before)
    for name, (a, b, scaling) in factors.items():
        assert a.shape == (8, before[name].shape[1])
        assert b.shape == (before[name].shape[0], 8)
        merged[name] = before[name] + scaling * b @ a
    expected = result.model.merge_and_unload().state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(value, merged[name])
    assert any(not torch.equal(merged[name], before[name]) for name in factors)


def test_a_saved_adapter_names_its_base_and_loads_with_it(tiny_base: Path, tmp_path: Path) -> None:
    settings = config(tmp_path / "run", finetuning="lora", model=str(tiny_base))
    result = Trainer(settings).train(ROWS)
    adapter = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tiny_base)
    assert not (tmp_path / "run/README.md").exists()
    loaded = load_model(str(tmp_path / "run"))
    ids = loaded.tokenizer("hello", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(loaded.model(ids).logits, result.model(ids).logits)
    with pytest.raises(GymError, match="is itself an adapter"):
        Trainer(config(tmp_path / "next", finetuning="lora", model=str(tmp_path / "run"))).train(ROWS)
    merged = Trainer(config(tmp_path / "full", model=str(tmp_path / "run"), max_steps=1)).train(ROWS)
    assert merged.steps == 1


def test_a_loss_that_is_not_finite_stops_the_run(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="diverged"):
        train(tiny_base, config(tmp_path / "run", learning_rate=1e30, max_grad_norm=0))


def test_training_reports_to_no_host(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *a, **k: sent.append(a))
    monkeypatch.delenv("CI", raising=False)
    train(tiny_base, config(tmp_path / "run", save_steps=2, max_steps=2))
    assert sent == []
    assert not list((tmp_path / "run").rglob("README.md"))


def test_sources_are_weighted_and_cut(tmp_path: Path) -> None:
    from gym_fed.training.rows.run_rows import rows_of

    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(10)))
    settings = TrainingConfig(
        data=[
            {"path": file, "num_examples": 4, "weight": 2.5},
            {"tasks": ["copy", "upper"], "num_examples": 6},
        ]
    )
    rows = rows_of(settings)
    assert sum("text" in row for row in rows) == 10
    assert {row["text"] for row in rows if "text" in row} == {f"row {i}" for i in range(4)}
    assert sum("messages" in row for row in rows) == 6
    with pytest.raises(GymError, match="no rows to train on"):
        rows_of(TrainingConfig())


@pytest.mark.shared
def test_a_model_without_chat_template_learns_texts(shared_folder: Path, tmp_path: Path) -> None:
    from gym_fed.evaluation import heldout_loss

    name = str(shared_folder / "models/stories260K")
    loaded = load_model(name)
    line = {"text": "The zebra of the moon sang to the purple clock. " * 3}
    before = heldout_loss(loaded.model, loaded.tokenizer, [line])
    settings = config(tmp_path / "run", model=name, algorithm="pretrain", max_length=32, learning_rate=1e-3)
    result = Trainer(settings).train([line] * 8)
    assert heldout_loss(result.model, result.tokenizer, [line]) < before - 0.5


def test_weights_that_the_last_step_made_infinite_are_an_error_and_no_model(
    tiny_base: Path, tmp_path: Path
) -> None:
    changes = {
        "optimizer": "sgd",
        "learning_rate": 1e38,
        "weight_decay": 1e10,
        "lr_scheduler_type": "constant",
    }
    settings = config(tmp_path / "run", max_steps=1, **changes)
    with pytest.raises(GymError, match="is not finite after step 1: training has diverged"):
        train(tiny_base, settings)
    assert not (tmp_path / "run" / "result.json").exists()
    assert not list((tmp_path / "run").glob("*.safetensors"))
