"""Every tuning method: it learns, changes only what it says, and is saved and loaded exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.train.tuning import AdaLoraSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TUNING
from gym_fed.evaluation import heldout_loss
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.adalora import adalora_schedule
from gym_fed.training.tuning.lora import lora_factors
from tests.support.quick import quick
from tests.support.tuning_cases import CASES, METHODS, ROWS, config, train, weights


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokenizer("hello world", return_tensors="pt")["input_ids"]).logits


def test_every_method_and_variant_is_tried_here() -> None:
    assert set(METHODS) == set(TUNING.own())
    for name in TUNING.own():
        assert TUNING.new(name).is_adapter == (name not in ("full", "freeze"))


class TunedRuns(dict[str, Any]):
    """One run of each case that a test asks for, on a model in memory, saved at the end."""

    def __init__(self, base: Path, folder: Path) -> None:
        self._base, self._folder = base, folder

    def __missing__(self, name: str) -> Any:
        loaded = load_model(str(self._base))
        before = weights(loaded.model)
        settings = config(self._folder / name, model=str(self._base), **CASES[name])
        trainer = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer)
        self[name] = (trainer.train(ROWS), before)
        return self[name]


@pytest.fixture(scope="module")
def runs(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> TunedRuns:
    return TunedRuns(tiny_base, tmp_path_factory.mktemp("runs"))


TRIED = quick(CASES, *set(METHODS) - {"boft"}, "dora", "pissa", "olora", "lora_fa", "embeddings")
"""The others differ from one of these in a setting that PEFT alone reads."""


@pytest.mark.few(5, "one path for every method")
@pytest.mark.parametrize("name", TRIED)
def test_the_loss_falls(runs: TunedRuns, name: str, tiny_base: Path) -> None:
    result, _ = runs[name]
    before = heldout_loss(load_model(str(tiny_base)).model, result.tokenizer, ROWS)
    assert heldout_loss(result.model, result.tokenizer, ROWS) < before - 0.005


@pytest.mark.parametrize("name", TRIED)
def test_only_what_is_declared_changes_and_an_adapter_comes_off_without_a_trace(
    runs: TunedRuns, name: str
) -> None:
    result, before = runs[name]
    if CASES[name]["finetuning"] in ("full", "freeze"):
        changed = {
            key for key, value in result.model.state_dict().items() if not torch.equal(value, before[key])
        }
        frozen = {"model.embed_tokens.weight", "lm_head.weight"} if name == "freeze" else set()
        assert changed
        assert not changed & frozen
        return
    values = {id(value): key for key, value in result.model.named_parameters()}
    learnt = {key for key, value in result.model.named_parameters() if value.requires_grad}
    allowed = ("lora_", "oft_", "boft_", "vera_lambda", "ia3_", "modules_to_save")
    assert learnt
    assert all(any(part in key for part in allowed) for key in learnt), learnt
    assert len(values) > len(learnt)
    base = result.model.get_base_model().state_dict()
    for key, value in base.items():
        plain = key.replace("base_layer.", "").replace("original_module.", "")
        if plain in before and "modules_to_save" not in key and not any(part in key for part in allowed):
            assert torch.equal(value, before[plain]), key
    assert any(".base_layer." in key or "q_proj" in key for key in base)


@pytest.mark.parametrize("name", TRIED)
def test_what_is_saved_gives_the_same_logits_on_the_original_base(
    runs: TunedRuns, name: str, tiny_base: Path
) -> None:
    result, _ = runs[name]
    again = load_model(str(result.output_dir))
    start = logits(load_model(str(tiny_base)).model, result.tokenizer)
    there = logits(again.model, again.tokenizer)
    torch.testing.assert_close(there, logits(result.model, result.tokenizer), rtol=0, atol=2e-6)
    assert float((there - start).abs().max()) > 1e-3


@pytest.mark.parametrize("name", TRIED)
def test_fewer_weights_are_trained_than_there_are(runs: TunedRuns, name: str) -> None:
    result, before = runs[name]
    parameters = list(result.model.parameters())
    total, trained = (
        sum(p.numel() for p in some) for some in (parameters, [p for p in parameters if p.requires_grad])
    )
    if name == "full":
        assert trained == total
    elif name != "embeddings":
        assert trained < 0.7 * sum(value.numel() for value in before.values())


@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_a_start_that_takes_from_the_base_ends_as_plain_lora_of_twice_the_rank(
    runs: TunedRuns, name: str
) -> None:
    result, before = runs[name]
    factors = lora_factors(result.model)
    expected = result.model.merge_and_unload().state_dict()
    for key, (a, b, scaling) in factors.items():
        twice = 8 if name == "olora" and "q_proj" in key else 16
        assert a.shape[0] == min(twice, *before[key].shape)  # no more than the weight's own rank
        torch.testing.assert_close(expected[key], before[key] + scaling * b @ a, rtol=0, atol=1e-6)


def test_a_stopped_run_gives_the_base_back_too(tiny_base: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_base))
    before = weights(loaded.model)
    trainer = Trainer(
        config(tmp_path / "run", **CASES["pissa"]),
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        should_stop=lambda: True,
    )
    with pytest.raises(GymError, match="stopped"):
        trainer.train(ROWS)
    for key, value in loaded.model.state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace("base_layer.", "")])


def test_freeze_takes_the_last_layers_the_first_or_parts_of_them() -> None:
    def trained(**freeze: Any) -> set[str]:
        model = load_model("gym-nano").model
        settings = TrainingConfig(finetuning="freeze", freeze=freeze)
        TUNING.new("freeze").prepare(model, settings)
        return {name for name, value in model.named_parameters() if value.requires_grad}

    count = load_model("gym-nano").model.config.num_hidden_layers
    last, first = trained(num_trainable_layers=1), trained(num_trainable_layers=-1)
    assert {name.split(".")[2] for name in last} == {str(count - 1)}
    assert {name.split(".")[2] for name in first} == {"0"}
    assert trained(num_trainable_layers=2) > last
    parts = trained(
        num_trainable_layers=1, trainable_modules=["self_attn.q_proj"], extra_modules=["embed_tokens"]
    )
    assert parts == {f"model.layers.{count - 1}.self_attn.q_proj.weight", "model.embed_tokens.weight"}
    for wrong in ({"trainable_modules": ["attention"]}, {"num_trainable_layers": 99}):
        with pytest.raises(GymError, match=r"freeze\.") as caught:
            trained(**wrong)
        assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_freeze_trains_the_blocks_that_llama_pro_added() -> None:
    model = load_model("gym-nano").model
    model.model.layers = torch.nn.ModuleList(list(model.model.layers[:2]) * 3)
    model.config.num_hidden_layers = 6
    blocks = {
        id(weight): f"layer {i % 2}"
        for i, layer in enumerate(model.model.layers)
        for weight in layer.parameters()
    }
    assert set(blocks.values()) == {"layer 0", "layer 1"}
    settings = TrainingConfig(finetuning="freeze", freeze={"num_trainable_layers": 3, "llama_pro": True})
    TUNING.new("freeze").prepare(model, settings)  # of every two layers the second
    assert {blocks.get(id(value)) for value in model.parameters() if value.requires_grad} == {"layer 1"}
    settings = TrainingConfig(finetuning="freeze", freeze={"num_trainable_layers": 4, "llama_pro": True})
    with pytest.raises(GymError, match="6 layers are not a multiple of num_trainable_layers 4"):
        TUNING.new("freeze").prepare(model, settings)


def test_adalora_takes_ranks_away(runs: TunedRuns) -> None:
    result, _ = runs["adalora"]
    kept = [value for key, value in result.model.named_parameters() if "lora_E" in key]
    ranks = [int((value != 0).sum()) for value in kept]
    assert sum(ranks) <= 8 * len(kept) < 12 * len(kept)


def test_adalora_needs_a_step_that_measures_before_the_one_that_settles_ranks() -> None:
    halves = AdaLoraSettings(warmup_fraction=0.0, final_fraction=0.5)
    assert adalora_schedule(halves, 4) == (0, 2)
    for steps in (1, 2):
        with pytest.raises(GymError, match=f"a run of {steps} optimiser step") as caught:
            adalora_schedule(halves, steps)
        assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_loraplus_and_lora_fa_move_their_own_weights(runs: TunedRuns, tiny_base: Path) -> None:
    from gym_fed.core.registries import OPTIMIZERS

    settings = TrainingConfig(finetuning="lora", lora={"loraplus_lr_ratio": 16}, learning_rate=1e-3)
    model = TUNING.new("lora").prepare(load_model(str(tiny_base)).model, settings)
    optimizer = OPTIMIZERS.new("adamw").make(model, settings)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3, 16e-3}
    assert runs["lora_fa"][0].losses != runs["dora"][0].losses
    drawn = TUNING.new("lora").prepare(load_model(str(tiny_base)).model, TrainingConfig(finetuning="lora"))
    for key, (a, _, _) in lora_factors(runs["lora_fa"][0].model).items():
        assert torch.equal(a, lora_factors(drawn)[key][0])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"finetuning": "lora", "lora": {"target_modules": ["nothing"]}},
            r"lora\.target_modules.*matches no layer",
        ),
        ({"finetuning": "oft", "oft": {"oft_block_size": 7}}, "oft: does not fit"),
        ({"finetuning": "boft", "boft": {"boft_block_size": 10}}, "boft: does not fit"),
        (
            {"finetuning": "ia3", "ia3": {"target_modules": ["x"], "feedforward_modules": []}},
            "matches no layer",
        ),
        (
            {"finetuning": "lora", "lora": {"modules_to_save": ["nope"]}},
            "modules_to_save: .* no module 'nope'",
        ),
        (
            {"finetuning": "lora", "lora": {"exclude_modules": ["nope"]}},
            "exclude_modules: .* no module 'nope'",
        ),
        ({"finetuning": "lora", "lora": {"rank_pattern": {"nope": 3}}}, "rank_pattern: .* no module 'nope'"),
        ({"finetuning": "lora", "lora": {"alpha_pattern": {"norm": 3}}}, "alpha_pattern keys did not match"),
        ({"finetuning": "lora", "lora": {"rank_pattern": {"[(": 3}}}, "is not a regular expression"),
        (
            {"finetuning": "lora", "lora": {"target_modules": "[("}},
            "target_modules: .* not a regular expression",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_and_not_bent(
    tiny_base: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        train(tiny_base, tmp_path / "run", **settings)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_patterns_that_match_no_target_are_refused_with_what_to_name(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="did not match") as caught:
        train(tiny_base, tmp_path / "run", finetuning="lora", lora={"alpha_pattern": {"norm": 3}})
    assert "list only modules that are in target_modules" in caught.value.hint


def test_a_config_is_as_it_was_after_the_model_is_prepared() -> None:
    settings = TrainingConfig(finetuning="lora", lora={"modules_to_save": ["embed_tokens"]})
    before = settings.model_dump()
    TUNING.new("lora").prepare(load_model("gym-nano").model, settings)  # whose head is tied to its embeddings
    assert settings.model_dump() == before


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"finetuning": "lora", "lora": {"init_lora_weights": "loftq"}}, "loftq needs 4-bit quantization"),
        ({"finetuning": "lora", "lora": {"lora_fa": True}, "optimizer": "sgd"}, "its own AdamW"),
        ({"finetuning": "adalora", "algorithm": "dpo"}, "adalora adds its penalty"),
        (
            {"finetuning": "adalora", "max_steps": 1},
            "a run of 1 optimiser step leaves none for reducing ranks",
        ),
        (
            {"finetuning": "boft", "boft": {"boft_n_butterfly_factor": 2}},
            "boft_n_butterfly_factor.* needs a CUDA",
        ),
        ({"finetuning": "full", "quantization": {}}, "quantization: finetuning full cannot use it"),
        ({"finetuning": "freeze", "quantization": {}}, "quantization: finetuning freeze cannot use it"),
        ({"finetuning": "boft", "quantization": {}}, "quantization: finetuning boft cannot use it"),
        (
            {"finetuning": "lora", "lora": {"init_lora_weights": "pissa"}, "quantization": {}},
            "pissa changes the base's weights",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_a_model_is_loaded(
    settings: dict[str, Any], problem: str
) -> None:
    if "butterfly" in problem and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(GymError, match=problem):
        Trainer(TrainingConfig(model="nowhere/at-all", **settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lora": {"freeze_a": True, "init_lora_weights": "pissa"}}, "freeze_a draws A itself"),
        ({"lora": {"freeze_a": True, "lora_fa": True}}, "mutually exclusive"),
        ({"lora": {"lora_fa": True, "loraplus_lr_ratio": 4}}, "needs a trained A"),
        ({"lora": {"init_lora_weights": "pissa_niter_"}}, "pissa_niter"),
        ({"lora": {"loftq_iter": 2}}, "loftq_iter applies only to"),
        ({"finetuning": "oft", "oft": {"r": 4}}, "either r or oft_block_size"),
        ({"finetuning": "adalora", "adalora": {"target_r": 12}}, "not below init_r"),
        ({"finetuning": "ia3", "ia3": {"feedforward_modules": ["up_proj"]}}, "not among target_modules"),
        ({"finetuning": "freeze", "freeze": {"num_trainable_layers": 0}}, "nothing would be trained"),
        (
            {"finetuning": "freeze", "freeze": {"num_trainable_layers": -1, "llama_pro": True}},
            "the number of added blocks",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainingConfig(**{"finetuning": "lora", **settings})
