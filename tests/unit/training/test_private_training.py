"""DP-SGD: examples are clipped exactly, noise is what the accountant takes it for, what is not accounted is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from gym_fed.base.models import load_model
from gym_fed.cli.train.train import outcome_lines
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.privacy import LocalPrivacy
from gym_fed.config.hub.task import TrainingRecipe, check_distillation
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.private.gradients import (
    ClippedGradients,
    LatticeNoise,
    example_losses,
    noisy_optimizer,
    require_exact,
)
from gym_fed.training.private.loop import _physical_batches, _require_finite, poisson_sample
from gym_fed.training.private.plan import make_plan
from gym_fed.training.run.checks import check_config
from gym_fed.training.run.result import summary
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import add_lora

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:In CPU autocast")

ROWS = [{"text": "abcabcabc" + "xyz"[i % 3] * (i % 5)} for i in range(48)]
NORM = 0.05


def config(folder: Path, base: Path, **changes: Any) -> TrainingConfig:
    values = {
        "model": str(base),
        "max_steps": 12,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-2,
        "max_length": 32,
        "device": "cpu",
        "output_dir": folder,
        "privacy": {"noise_multiplier": 1.0},
    }
    return TrainingConfig(**{**values, **changes})


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 60, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "labels": torch.where(mask.bool(), ids, -100), "attention_mask": mask}


def model_of(base: Path, tuning: str) -> Any:
    model = load_model(str(base)).model
    if tuning == "untied":
        head = torch.nn.Linear(16, model.config.vocab_size, bias=False)
        head.weight.data.copy_(model.lm_head.weight.data)
        model.lm_head = head
    if tuning == "lora":
        from gym_fed.config.train.training import LoraSettings

        model = add_lora(model, LoraSettings(r=2), seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    return model.train()


@pytest.mark.parametrize(
    ("mode", "tuning"),
    [
        ("hooks", "full"),
        ("functorch", "full"),
        ("ghost", "untied"),
        ("hooks", "lora"),
        ("functorch", "lora"),
        ("ghost", "lora"),
    ],
)
def test_the_sum_of_clipped_gradients_is_that_of_a_loop_over_the_examples(
    tiny_base: Path, mode: str, tuning: str
) -> None:
    model, rows = model_of(tiny_base, tuning), batch()
    weights = [w for w in model.parameters() if w.requires_grad]
    expected = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    norms = []
    for i in range(4):
        one = {key: value[i : i + 1] for key, value in rows.items()}
        gradients = torch.autograd.grad(example_losses(model, one).sum(), weights)
        norm = torch.stack([g.double().norm() for g in gradients]).norm()
        norms.append(float(norm))
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient.double() * min(1.0, NORM / (float(norm) + 1e-6))
    assert max(norms) > NORM  # something is clipped
    clipped = ClippedGradients(model, mode, NORM)
    require_exact(clipped)
    model.train()
    optimizer = noisy_optimizer(
        torch.optim.SGD(weights, lr=1.0),
        mode,
        noise_multiplier=1.0,
        max_grad_norm=NORM,
        expected_batch_size=4,
    )
    for weight in weights:
        weight.summed_grad = torch.zeros_like(weight)
    for half in (slice(0, 3), slice(3, 4)):  # physical batches of one logical batch
        clipped.add({key: value[half] for key, value in rows.items()}, optimizer)
    error = max(float((w.summed_grad - e).abs().max()) for w, e in zip(weights, expected, strict=True))
    assert error < 1e-6
    clipped.close()
    assert not any(hasattr(w, "grad_sample") or hasattr(w, "summed_grad") for w in model.parameters())


@pytest.mark.parametrize(("mode", "tuning"), [("hooks", "full"), ("functorch", "lora"), ("ghost", "lora")])
def test_an_example_that_overflows_adds_nothing_and_changes_nothing_for_the_others(
    tiny_base: Path, mode: str, tuning: str
) -> None:
    sums, trap, whole = [], 62, batch()
    whole["input_ids"][0, 3] = whole["labels"][0, 3] = trap
    for rows in (slice(0, 4), slice(1, 4)):
        model, chosen = model_of(tiny_base, tuning), {key: value[rows] for key, value in whole.items()}
        weights = [w for w in model.parameters() if w.requires_grad]
        model.get_input_embeddings().register_forward_hook(
            lambda module, given, out: out.masked_fill((given[0] == trap)[..., None], math.inf)
        )
        optimizer = noisy_optimizer(
            torch.optim.SGD(weights, lr=1.0),
            mode,
            noise_multiplier=1.0,
            max_grad_norm=NORM,
            expected_batch_size=4,
        )
        for weight in weights:
            weight.summed_grad = torch.zeros_like(weight)
        losses = ClippedGradients(model, mode, NORM).add(chosen, optimizer)
        assert torch.isfinite(losses).tolist() == [False, True, True, True][rows]
        sums.append(torch.cat([w.summed_grad.flatten() for w in weights]))
    assert 0 < float(sums[0].norm()) <= 3 * NORM + 1e-5
    assert torch.allclose(sums[0], sums[1], atol=1e-6)


def test_a_row_is_padded_by_its_own_length_alone() -> None:
    rows = [{"input_ids": [n] * n, "labels": [n] * n} for n in (3, 16, 17, 30, 5)]
    batches = list(_physical_batches(rows, 2, max_length=30))
    assert [tuple(b["input_ids"].shape) for b in batches] == [(2, 16), (1, 16), (2, 30)]
    assert batches[0]["input_ids"][0].tolist() == [3] * 16
    assert batches[0]["labels"][0].tolist() == [3] * 3 + [-100] * 13
    assert batches[0]["attention_mask"].sum(1).tolist() == [3, 16]


def test_a_row_with_nothing_to_learn_is_drawn_like_any_other_and_adds_nothing(
    tmp_path: Path, tiny_base: Path
) -> None:
    loaded, rows = load_model(str(tiny_base)), [{"prompt": "hello world", "completion": "b"}, {"text": "abc"}]
    private = config(tmp_path, tiny_base, max_length=8)
    encoded = ALGORITHMS.new("sft").encode(private, loaded.tokenizer, rows)
    assert [any(label != -100 for label in row["labels"]) for row in encoded] == [False, True]
    open_config = private.model_copy(update={"privacy": None})
    assert len(ALGORITHMS.new("sft").encode(open_config, loaded.tokenizer, rows)) == 1
    (physical,) = _physical_batches([encoded[0], {"input_ids": [], "labels": []}], 2, max_length=8)
    model = model_of(tiny_base, "lora")
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = noisy_optimizer(
        torch.optim.SGD(weights, lr=1.0),
        "hooks",
        noise_multiplier=1.0,
        max_grad_norm=NORM,
        expected_batch_size=2,
    )
    for weight in weights:
        weight.summed_grad = torch.zeros_like(weight)
    ClippedGradients(model, "hooks", NORM).add(physical, optimizer)
    assert not any(weight.summed_grad.any() for weight in weights)


def test_losses_that_are_not_finite_end_no_run_and_weights_that_are_not_do(
    tmp_path: Path, tiny_base: Path
) -> None:
    settings = config(tmp_path, tiny_base, max_steps=2, save_final=False, optimizer="sgd")
    loaded = load_model(str(tiny_base))
    loaded.model.model.embed_tokens.register_forward_hook(lambda module, given, out: out * math.inf)
    result = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(dataset=ROWS)
    assert result.losses == [0.0, 0.0]
    with pytest.raises(GymError, match="noised weights are not finite after step 1"):
        _require_finite([torch.tensor([0.0, math.nan])], 1)


def test_tied_weights_are_refused_with_ghost_by_name_and_remedy(tiny_base: Path) -> None:
    clipped = ClippedGradients(model_of(tiny_base, "full"), "ghost", NORM)
    with pytest.raises(GymError, match="tying") as caught:
        require_exact(clipped)
    assert "hooks" in caught.value.hint


def test_a_layer_that_couples_examples_is_found_on_made_up_rows(tiny_base: Path) -> None:
    class Mixing(torch.nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values - values.mean(dim=0, keepdim=True))

    model = model_of(tiny_base, "full")
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Mixing(old.in_features, old.out_features, bias=False)
    with pytest.raises(GymError, match="has no per-example gradients"):
        require_exact(ClippedGradients(model, "hooks", NORM))


def test_noise_is_a_lattice_point_whatever_the_sum_was() -> None:
    lattice = LatticeNoise(2.0, 0.5, 20_000)
    assert lattice.std == pytest.approx(1.0, rel=1e-3)
    assert lattice.std * (1 - 2.0 * math.sqrt(20_000) / 2**20) == pytest.approx(1.0)
    noised = lattice.add(torch.full((20_000,), 0.3)).double()
    steps = noised / (lattice.std / 2**20)
    # float32 of a multiple of the step: off by at most 1/4 of one up to 8 deviations, 1/2 if it were none.
    assert (steps - steps.round()).abs().max() <= 0.26
    assert float(noised.mean()) == pytest.approx(0.3, abs=0.05)
    assert float(noised.std()) == pytest.approx(1.0, rel=0.05)
    with pytest.raises(GymError, match="too many"):
        LatticeNoise(1e6, 1.0, 20_000)


def test_batches_are_independent_draws_of_every_example() -> None:
    counts = np.zeros(50)
    sizes = []
    for _ in range(4000):
        chosen = poisson_sample(50, 5)
        counts[chosen] += 1
        sizes.append(len(chosen))
    assert np.mean(sizes) == pytest.approx(5.0, abs=0.3)
    assert np.var(sizes) == pytest.approx(4.5, rel=0.2)  # n q (1 - q): not of one size
    assert counts.min() > 270  # 400 is expected, with a standard deviation of 19
    assert counts.max() < 530
    assert poisson_sample(3, 3) == [0, 1, 2]


def test_epsilon_is_dp_accountings_own_and_never_reported_too_low(tmp_path: Path, tiny_base: Path) -> None:
    plan = make_plan(config(tmp_path, tiny_base), 48)
    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(12 / 48, GaussianDpEvent(1.0)), 12)
    assert plan.epsilon() == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert plan.epsilon_at_most(1) >= plan.epsilon(1)
    assert plan.epsilon_at_most(12) == plan.epsilon()


def test_noise_is_found_for_a_target_epsilon(tmp_path: Path, tiny_base: Path) -> None:
    settings = config(tmp_path, tiny_base, max_steps=1, privacy={"target_epsilon": 3.0})
    plan = make_plan(settings, 12)
    assert 2.9 < plan.epsilon() <= 3.0
    with pytest.raises(GymError, match="only 11 examples"):
        make_plan(settings, 11)


def test_a_private_run_learns_is_stopped_and_ends_with_what_it_cost(tmp_path: Path, tiny_base: Path) -> None:
    settings = config(tmp_path / "run", tiny_base, save_steps=4)
    stops = iter([False] * 5 + [True])
    with pytest.raises(GymError) as caught:
        Trainer(settings, should_stop=lambda: next(stops)).train(dataset=ROWS)
    assert caught.value.code is ErrorCode.INTERRUPTED
    reports = []
    result = Trainer(settings, on_report=reports.append).train(dataset=ROWS)
    assert [report.step for report in reports] == list(range(7, 13))
    assert result.steps == 12
    assert len(result.losses) == 12
    assert result.losses[-1] < result.losses[0] - 0.2
    assert result.privacy is not None
    assert result.epsilon == result.privacy.epsilon() == reports[-1].epsilon
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["epsilon"] == result.epsilon
    assert outcome_lines(result)[0].endswith(f"; privacy: epsilon {result.epsilon:.2f} at delta 1e-05")
    assert summary(tmp_path / "run")["figures"]["target_delta"] == 1e-5
    assert kept["privacy"]["expected_batch_size"] == 12
    assert kept["privacy"]["num_examples"] == 48
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epsilon"] == result.epsilon


def test_steps_without_examples_are_steps_of_noise(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.training.private.loop.poisson_sample", lambda *_: [])
    settings = config(tmp_path, tiny_base, max_steps=2, save_final=False, optimizer="sgd")
    loaded = load_model(str(tiny_base))
    model, tokenizer = loaded.model, loaded.tokenizer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = Trainer(settings, model=model, tokenizer=tokenizer).train(dataset=ROWS)
    assert result.losses == [0.0, 0.0]
    moved = model.state_dict()["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]
    # Two steps of noise: learning rate x std / expected batch, each falling linearly.
    assert float(moved.std()) == pytest.approx(2e-2 / 12 * math.sqrt(1 + 0.25), rel=0.15)
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithm": "dpo"}, "algorithm"),
        ({"algorithm": "pretrain"}, "packing"),
        ({"packing": "bfd"}, "packing"),
        ({"finetuning": "ia3"}, "finetuning"),
        ({"finetuning": "lora", "lora": {"use_dora": True}}, "use_dora"),
        ({"optimizer": "muon"}, "optimizer"),
        ({"data": [{"path": "a.jsonl", "weight": 2}]}, "weight"),
        ({"data": [{"path": "a.jsonl", "num_examples": 2}]}, "num_examples"),
        ({"eval_split": 0.1}, "eval_split"),
        ({"group_by_length": True}, "group_by_length"),
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"loss_spikes": {"rollback": False}}, "loss_spikes"),
        ({"auto_batch_size": {}}, "auto_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_what_is_not_accounted_for_is_refused_with_the_reason(
    tmp_path: Path, tiny_base: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(GymError, match=named) as caught:
        check_config(config(tmp_path, tiny_base, **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "privacy is set" in caught.value.message
    assert caught.value.hint


def test_several_processes_are_refused_and_one_passes(tmp_path: Path, tiny_base: Path) -> None:
    check_config(config(tmp_path, tiny_base))
    with pytest.raises(GymError, match="2 processes"):
        check_config(config(tmp_path, tiny_base), num_processes=2)


@pytest.mark.parametrize("section", [{}, {"noise_multiplier": 1.0, "target_epsilon": 3.0}])
def test_noise_is_given_or_found_but_not_both(
    tmp_path: Path, tiny_base: Path, section: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="either noise_multiplier or target_epsilon"):
        config(tmp_path, tiny_base, privacy=section)


def test_a_round_of_preferences_or_of_distillation_cannot_be_private() -> None:
    with pytest.raises(ValueError, match="no accounting for dpo"):
        TrainingRecipe(algorithm="dpo", privacy=LocalPrivacy())
    with pytest.raises(ValueError, match="without noise"):
        check_distillation(TrainingRecipe(privacy=LocalPrivacy()), CodecPolicy(distill_steps=2))


def test_a_search_over_private_runs_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    from gym_fed.config.train.training import SearchConfig
    from gym_fed.training.search import Search

    values = config(tmp_path, tiny_base).model_dump(mode="json", exclude_none=True)
    search = {"metric": "loss", "parameters": {"learning_rate": {"choices": [0.1, 0.2]}}}
    with pytest.raises(GymError, match="every trial spends privacy"):
        Search(SearchConfig(**values, search=search))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            {"noise_multiplier": 1e6},
            r"noise_multiplier is 1e\+06: over 12 steps of about 12 examples the noise is 2.41e\+04",
        ),
        ({"target_epsilon": 1e-9}, "epsilon 1e-09 at delta 1e-05 cannot be reached in 12 steps"),
    ],
)
def test_noise_that_drowns_everything_is_refused_with_figures(
    tiny_base: Path, tmp_path: Path, section: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        Trainer(config(tmp_path / "run", tiny_base, privacy=section, packing=False)).train(ROWS)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_noise_above_the_signal_of_one_run_is_said_and_below_it_is_not(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(config(tmp_path, tiny_base, privacy={"noise_multiplier": 40.0}), len(ROWS))
    assert not capsys.readouterr().err
    make_plan(config(tmp_path, tiny_base, privacy={"noise_multiplier": 50.0}), len(ROWS))
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "the noise is 1.2 times the maximum contribution of the examples; almost nothing will be learned"
        in said
    )


def test_noise_that_cannot_be_accounted_for_is_refused_before_the_first_step(
    tiny_base: Path, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match="so little noise gives no privacy"):
        make_plan(config(tmp_path, tiny_base, privacy={"noise_multiplier": 1e-12}), len(ROWS))
