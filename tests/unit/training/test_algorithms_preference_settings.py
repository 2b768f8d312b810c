"""Preferences, settings and rows: what nothing would read is refused, and long rows are cut as stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.algorithms.preference import TdpoSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.algorithms.preference.tdpo import answer_terms, tdpo_loss
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer
from tests.support.preferences import UNEVEN, capitals, config, train


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"algorithm": "dpo", "dpo": {"loss_type": "sigmoid", "label_smoothing": 0.1}},
            "label_smoothing: only",
        ),
        ({"algorithm": "dpo", "dpo": {"loss_type": "exo_pair"}}, "exo_pair needs a value above 0"),
        (
            {"algorithm": "dpo", "dpo": {"loss_type": ["hinge", "sft"], "loss_weights": [1.0]}},
            "1 weight for 2",
        ),
        ({"algorithm": "dpo", "dpo": {"loss_type": []}}, "at least 1"),
        ({"algorithm": "dpo", "dpo": {"loss_type": "orpo"}}, "'sigmoid'"),
        ({"algorithm": "dpo", "dpo": {"f_alpha_divergence_coef": 0.9}}, "only f_divergence_type"),
        ({"algorithm": "dpo", "dpo": {"discopop_tau": 1.0}}, "only loss_type discopop"),
        ({"algorithm": "dpo", "dpo": {"loss_type": "aot", "use_weighting": True}}, "cannot weight"),
        (
            {"algorithm": "dpo", "dpo": {"loss_type": "aot", "f_divergence_type": "forward_kl"}},
            "not defined for aot",
        ),
        ({"algorithm": "tdpo", "tdpo": {"variant": 1, "alpha": 0.9}}, "variant 1 does not use it"),
        ({"algorithm": "kto", "dpo": {}}, "algorithm is kto"),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        validate(values, TrainingConfig, "test.yaml")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    ("algorithm", "changes", "problem"),
    [
        ("kto", {"per_device_train_batch_size": 1}, "per_device_train_batch_size: kto estimates the KL"),
        ("kto", {"group_by_length": True}, "group_by_length: kto uses its rows in a fixed order"),
        ("dpo", {"packing": True}, "packing: not used by dpo, which learns from answers"),
        ("orpo", {"assistant_only_loss": True}, "assistant_only_loss: not used by orpo"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_is_loaded(
    tmp_path: Path, algorithm: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        check_config(config(tmp_path / "run", algorithm, **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "run").exists()


def test_kto_takes_batches_of_one_row_where_a_step_has_several(tmp_path: Path) -> None:
    check_config(
        config(tmp_path / "run", "kto", per_device_train_batch_size=1, gradient_accumulation_steps=2)
    )


def test_kto_without_its_kl_takes_single_rows(tiny_base: Path, tmp_path: Path) -> None:
    settings = config(
        tmp_path / "run",
        "kto",
        per_device_train_batch_size=1,
        group_by_length=True,
        max_steps=2,
        kto={"loss_type": "apo_zero_unpaired"},
    )
    assert train(tiny_base, settings, UNEVEN).steps == 2


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "simpo", "tdpo", "reward_model"])
def test_rows_can_be_batched_by_length(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    settings = config(tmp_path / "run", algorithm, group_by_length=True, max_steps=2)
    assert train(tiny_base, settings, UNEVEN).steps == 2


def encode(algorithm: str, rows: list[dict[str, Any]], max_length: int = 48, **changes: Any) -> Any:
    settings = config(Path("unused"), algorithm, max_length=max_length, **changes)
    return ALGORITHMS.new(algorithm).encode(settings, load_tokenizer("gym-nano"), rows)


def test_answers_are_the_template_s_and_texts_end_with_the_end_token() -> None:
    tokenizer = load_tokenizer("gym-nano")
    chat, text = capitals(1, 0) + capitals(1, 0, chat=False)
    word = text["rejected"]
    first, second = encode("dpo", [chat, text])
    assert (
        tokenizer.decode(first["prompt_ids"])
        == f"<|im_start|>user\nsay {word}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(first["chosen_ids"]) == f"{word.upper()}<|im_end|>\n"
    assert tokenizer.decode(second["prompt_ids"]) == f"say {word}: "
    assert tokenizer.decode(second["rejected_ids"]) == f"{word}<|im_end|>"


@pytest.mark.parametrize("algorithm", ["dpo", "tdpo", "orpo", "simpo", "kto"])
def test_a_long_answer_is_cut_at_its_end_and_a_prompt_without_room_for_one_is_left_out(
    algorithm: str,
) -> None:
    long = {"prompt": "p" * 60, "chosen": "A", "rejected": "a"}
    rows = [{"prompt": "p" * 40, "chosen": "A" * 30, "rejected": "a"}, long]
    if algorithm == "kto":
        rows = [
            {"prompt": r["prompt"], "completion": r[k], "label": k == "chosen"}
            for r in rows
            for k in ("chosen", "rejected")
        ]
    encoded = encode(algorithm, rows)
    assert len(encoded) == (2 if algorithm == "kto" else 1)
    key = {"kto": "completion_ids", "orpo": "chosen_labels", "simpo": "chosen_labels"}.get(
        algorithm, "chosen_ids"
    )
    longest = max(len([i for i in row[key] if i != -100]) for row in encoded)
    assert longest == 8
    assert max(row["length"] for row in encoded) == 48
    with pytest.raises(GymError, match="within max_length=48"):
        encode(algorithm, rows[2:] if algorithm == "kto" else [long])


def test_a_reward_model_leaves_out_pairs_of_which_one_is_too_long() -> None:
    fits = {"prompt": "p" * 40, "chosen": "A" * 7, "rejected": "a"}
    longer = {**fits, "chosen": "A" * 8}
    assert [row["length"] for row in encode("reward_model", [fits, longer])] == [48]
    with pytest.raises(GymError, match="the row has no tokens to train on"):
        encode("reward_model", [longer])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "p", "chosen": [{"role": "assistant", "content": "A"}], "rejected": "a"},
            "row 2: prompt, chosen",
        ),
        ({"prompt": "p", "chosen": 1, "rejected": "a"}, "row 2: prompt, chosen, rejected must be"),
        (
            {"prompt": "p", "chosen": "A", "rejected": "a", "images": ["x.png"]},
            "row 2 has images, but the model reads only text",
        ),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        encode("dpo", [*capitals(1, 0), row])
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_kto_shuffles_by_seed_and_pairs_prompts_with_their_neighbours_answers() -> None:
    rows = [{"prompt": f"{i}", "completion": f"a{i}", "label": i % 2 == 0} for i in range(7)]
    first = encode("kto", rows, per_device_train_batch_size=3)
    assert first == encode("kto", rows, per_device_train_batch_size=3)
    assert first != encode("kto", rows, per_device_train_batch_size=3, seed=1)
    assert sorted(row["prompt_ids"] for row in first) == sorted(
        row["prompt_ids"] for row in encode("kto", rows, per_device_train_batch_size=3, seed=1)
    )
    neighbours = [2, 0, 1, 5, 3, 4, 5]
    assert [row["KL_completion_ids"] for row in first] == [first[i]["completion_ids"] for i in neighbours]
    with pytest.raises(GymError, match="row 1: label is 'good'"):
        encode("kto", [{**rows[0], "label": "good"}])
    with pytest.raises(GymError, match="at least two rows"):
        encode("kto", rows[:1])


@pytest.mark.parametrize("variant", [1, 2])
def test_the_loss_of_tdpo_is_the_papers(variant: int) -> None:
    """Word by word in float64: sums over the tokens of the answer, KL over the vocabulary, reference first."""
    torch.manual_seed(0)
    pairs, length, vocabulary, beta, alpha = 3, 6, 11, 0.3, 0.7
    logits = torch.randn(2 * pairs, length, vocabulary, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2 * pairs, length, vocabulary, dtype=torch.float64)
    labels = torch.randint(vocabulary, (2 * pairs, length))
    starts, ends = [2, 1, 3, 2, 1, 3], [6, 4, 5, 5, 6, 6]
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        labels[row, :start] = -100
        labels[row, end:] = -100
    settings = TdpoSettings(beta=beta, variant=variant, **({"alpha": alpha} if variant == 2 else {}))
    _, lead, divergence = answer_terms(logits, reference, labels)
    loss = tdpo_loss((lead[:pairs], divergence[:pairs]), (lead[pairs:], divergence[pairs:]), settings)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)

    expected = []
    for pair in range(pairs):
        leads, kls = [], []
        for row in (pair, pairs + pair):
            lead_sum = torch.zeros((), dtype=torch.float64)
            kl_sum = torch.zeros((), dtype=torch.float64)
            for t in range(starts[row], ends[row]):
                pi = torch.softmax(logits[row, t - 1], -1)
                ref = torch.softmax(reference[row, t - 1], -1)
                token = labels[row, t]
                lead_sum = lead_sum + torch.log(pi[token] / ref[token])
                kl_sum = kl_sum + sum(ref[v] * torch.log(ref[v] / pi[v]) for v in range(vocabulary))
            leads.append(lead_sum)
            kls.append(kl_sum)
        u = beta * (leads[0] - leads[1])
        one, two = beta * kls[1] - beta * kls[0], alpha * (beta * kls[1] - beta * kls[0].detach())
        delta = one if variant == 1 else two
        expected.append(-torch.log(1 / (1 + torch.exp(-(u - delta)))))
    torch.testing.assert_close(loss, torch.stack(expected), rtol=1e-12, atol=1e-12)
    (wanted,) = torch.autograd.grad(torch.stack(expected).sum(), logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "reward_model"])
def test_pairs_with_pictures_are_refused_not_read_without_them(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    loaded = load_model(str(tiny_base))
    rows = [{**row, "images": ["cat.png"]} for row in capitals(4, 0)]
    settings = TrainingConfig(algorithm=algorithm, output_dir=tmp_path / "run", device="cpu")
    reader = "the model" if algorithm == "dpo" else algorithm
    with pytest.raises(GymError, match=f"row 1 has images, but {reader} reads only text; of"):
        Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(rows)
    assert not (tmp_path / "run").exists()
