"""What each algorithm's trainer computes on a real batch is its paper's formula, written out here a second time.

The formulas below take unpadded rows one by one, in float64, and share no code with the trainers. Before the loss is
taken the policy's weights are moved, so that it differs from its reference and from the policy that wrote the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.encoding import IGNORED
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.training.run.job import Job
from tests.support.preferences import UNEVEN
from tests.support.siblings import make_sibling

Row = dict[str, Any]
WORDS = [
    {
        "messages": [
            {"role": "user", "content": f"say {word}"},
            {"role": "assistant", "content": word.upper() * (1 + n)},
        ],
        "forget": n % 2 == 0,
    }
    for n, word in enumerate(["ab", "cde", "f", "ghij"])
]
PROMPTS = [{"prompt": [{"role": "user", "content": f"say {letter}"}]} for letter in "abcd"]


def config(folder: Path, algorithm: str, section: Row | None, batch: int) -> TrainingConfig:
    return TrainingConfig(
        algorithm=algorithm,
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=batch,
        max_length=64,
        device="cpu",
        num_threads=1,
        **({} if section is None else {algorithm: section}),
    )


class Built:
    """A trainer of an algorithm on the tiny model, with the first batch of its data.

    Attributes:
        before: The model at the start, the reference.
    """

    def __init__(
        self,
        base: Path,
        folder: Path,
        algorithm: str,
        rows: list[Row],
        section: Row | None,
        graders: Any = (),
    ) -> None:
        loaded, before = load_model(str(base)), load_model(str(base))
        settings = config(folder, algorithm, section, 4 * len(rows) if graders else len(rows))
        algorithm_object = ALGORITHMS.new(algorithm)
        self.encoded = algorithm_object.encode(settings, loaded.tokenizer, rows)
        self.model = algorithm_object.adapt(loaded.model, loaded.tokenizer, settings)
        self.before, self.tokenizer = before.model.eval(), loaded.tokenizer
        job = Job(settings, self.model, loaded.tokenizer, self.encoded, None, folder, [], graders)
        self.trainer = algorithm_object.build(job)
        self.trainer.current_gradient_accumulation_steps = 1
        self.batch = next(iter(self.trainer.get_train_dataloader()))

    def move(self, size: float = 0.3, seed: int = 1) -> None:
        """Make the policy another one than at the start, far enough that every term of the formula counts."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(size * torch.randn(weight.shape, generator=generator))
        self.model.train()

    def loss(self) -> Any:
        """What a training step takes the gradient of, for a step of this one batch."""
        if hasattr(self.trainer, "count"):
            self.trainer.count([self.batch])
        return self.trainer.compute_loss(self.model, self.trainer._prepare_inputs(self.batch)).item()


@torch.no_grad()
def distributions(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows each token but the last, ``[len(ids) - 1, vocabulary]`` float64."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def token_log_probs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities of the answer's tokens, float64."""
    found = distributions(model, prompt + answer).gather(-1, torch.tensor(prompt + answer)[1:, None])[:, 0]
    return found[-len(answer) :]


def log_prob(model: Any, prompt: list[int], answer: list[int]) -> float:
    return float(token_log_probs(model, prompt, answer).sum())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def assert_close(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.fixture
def pairs(tiny_base: Path, tmp_path: Path) -> Any:
    def built(algorithm: str, **section: Any) -> Built:
        found = Built(tiny_base, tmp_path / "run", algorithm, as_rows(algorithm), section)
        found.move()
        return found

    return built


def as_rows(algorithm: str) -> list[Row]:
    if algorithm != "kto":
        return UNEVEN
    return [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
        for row, key in zip(UNEVEN, ["chosen", "chosen", "rejected"] * 3, strict=False)
    ]


def log_ratios(built: Built, row: Row, key: str) -> float:
    return log_prob(built.model, row["prompt_ids"], row[key]) - log_prob(
        built.before, row["prompt_ids"], row[key]
    )


@pytest.mark.parametrize("precomputed", [True, False])
def test_dpos_loss_is_equation_7(pairs: Any, precomputed: bool) -> None:
    built = pairs("dpo", beta=0.4, precompute_ref_log_probs=precomputed)
    expected = mean(
        [
            -math.log(
                sigmoid(0.4 * (log_ratios(built, row, "chosen_ids") - log_ratios(built, row, "rejected_ids")))
            )
            for row in built.encoded
        ]
    )
    assert_close(built.loss(), expected)


@pytest.mark.parametrize("variant", [1, 2])
def test_tdpos_loss_is_that_of_its_variant(pairs: Any, variant: int) -> None:
    built = pairs("tdpo", beta=0.4, variant=variant, **({"alpha": 0.7} if variant == 2 else {}))

    def sequential_kl(row: Row, key: str) -> float:
        policy, reference = (
            distributions(m, row["prompt_ids"] + row[key]) for m in (built.model, built.before)
        )
        divergences = (reference.exp() * (reference - policy)).sum(-1)
        return float(divergences[-len(row[key]) :].sum())

    losses = []
    for row in built.encoded:
        u = log_ratios(built, row, "chosen_ids") - log_ratios(built, row, "rejected_ids")
        delta = sequential_kl(row, "rejected_ids") - sequential_kl(row, "chosen_ids")
        losses.append(-math.log(sigmoid(0.4 * (u - (delta if variant == 1 else 0.7 * delta)))))
    assert_close(built.loss(), mean(losses))


def test_ktos_loss_is_equation_7_with_the_kl_of_the_whole_step(pairs: Any) -> None:
    built = pairs("kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.8)
    built.model.load_state_dict(built.before.state_dict())
    built.move(0.1, seed=10)  # one whose drift is not cut at 0
    drift = mean([log_ratios(built, row, "KL_completion_ids") for row in built.encoded])
    losses = []
    for row in built.encoded:
        gap = 0.4 * (log_ratios(built, row, "completion_ids") - max(0.0, drift))
        losses.append(1.3 * (1 - sigmoid(gap)) if row["label"] else 0.8 * (1 - sigmoid(-gap)))
    assert drift > 0
    assert_close(built.loss(), mean(losses))


def test_orpos_loss_is_equations_6_and_7(pairs: Any) -> None:
    built = pairs("orpo", beta=0.4)
    ratios, words = [], []
    for row in map(unwhole, built.encoded):
        averages = [
            float(token_log_probs(built.model, row["prompt_ids"], row[key]).mean())
            for key in ("chosen_ids", "rejected_ids")
        ]
        odds = [math.exp(p) / (1 - math.exp(p)) for p in averages]
        ratios.append(-math.log(sigmoid(math.log(odds[0] / odds[1]))))
        whole = row["prompt_ids"] + row["chosen_ids"]
        words += token_log_probs(built.model, whole[:1], whole[1:]).tolist()
    assert_close(built.loss(), -mean(words) + 0.4 * mean(ratios))


def test_orpos_loss_on_the_answer_alone_is_a_mean_over_pairs(pairs: Any) -> None:
    built = pairs("orpo", beta=0.4, nll="answer")
    losses = []
    for row in map(unwhole, built.encoded):
        averages = [
            float(token_log_probs(built.model, row["prompt_ids"], row[key]).mean())
            for key in ("chosen_ids", "rejected_ids")
        ]
        odds = [math.exp(p) / (1 - math.exp(p)) for p in averages]
        losses.append(-averages[0] - 0.4 * math.log(sigmoid(math.log(odds[0] / odds[1]))))
    assert_close(built.loss(), mean(losses))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpos_loss_is_equation_6(pairs: Any, smoothing: float) -> None:
    built = pairs("simpo", beta=1.5, gamma=0.3, cpo_alpha=0.6, label_smoothing=smoothing)
    losses, words = [], []
    for row in map(unwhole, built.encoded):
        chosen, rejected = (
            token_log_probs(built.model, row["prompt_ids"], row[key])
            for key in ("chosen_ids", "rejected_ids")
        )
        margin = 1.5 * float(chosen.mean() - rejected.mean()) - 0.3
        losses.append(-(1 - smoothing) * math.log(sigmoid(margin)) - smoothing * math.log(sigmoid(-margin)))
        words += chosen.tolist()
    assert_close(built.loss(), mean(losses) - 0.6 * mean(words))


def unwhole(row: Row) -> Row:
    start = len(row["prompt_input_ids"])
    return {
        "prompt_ids": row["prompt_input_ids"],
        "chosen_ids": row["chosen_input_ids"][start:],
        "rejected_ids": row["rejected_input_ids"][start:],
    }


def test_a_reward_models_loss_is_equation_1_with_its_centre(pairs: Any) -> None:
    built = pairs("reward_model", center_rewards_coefficient=0.3)
    losses = []
    for row in built.encoded:
        with torch.no_grad():
            chosen, rejected = (
                float(built.model(input_ids=torch.tensor([row[key]])).logits[0, 0].double())
                for key in ("chosen_ids", "rejected_ids")
            )
        losses.append(-math.log(sigmoid(chosen - rejected)) + 0.3 * (chosen + rejected) ** 2)
    assert_close(built.loss(), mean(losses))


def answers(row: Row) -> tuple[list[int], torch.Tensor]:
    """Ids, and which of the tokens after the first are learned from."""
    return row["input_ids"], torch.tensor(row["labels"][1:]) != IGNORED


def learned(model: Any, row: Row) -> torch.Tensor:
    ids, labelled = answers(row)
    return token_log_probs(model, ids[:1], ids[1:])[labelled]


@pytest.mark.parametrize(
    "section",
    [
        {"loss_type": "dft"},
        {"loss_type": "eaft", "eaft_alpha": 1.5},
        {"loss_type": "asft", "asft_alpha": 0.7},
        {"label_smoothing": 0.2},
    ],
)
def test_sfts_other_losses_weigh_each_word_as_their_papers_do(
    tiny_base: Path, tmp_path: Path, section: Row
) -> None:
    built = Built(tiny_base, tmp_path / "run", "sft", WORDS, section)
    built.move()
    losses = []
    for row in built.encoded:
        found = distributions(built.model, row["input_ids"])
        start = distributions(built.before, row["input_ids"])
        for at, label in enumerate(row["labels"][1:]):
            if label == IGNORED:
                continue
            logs = found[at].tolist()
            if section.get("loss_type") == "dft":
                losses.append(-math.exp(logs[label]) * logs[label])
            elif section.get("loss_type") == "asft":
                divergence = sum(math.exp(p) * (p - q) for p, q in zip(start[at].tolist(), logs, strict=True))
                assert divergence > 1e-3
                losses.append(-math.exp(logs[label]) * logs[label] + 0.7 * divergence)
            elif section.get("loss_type") == "eaft":
                top = sorted(map(math.exp, logs), reverse=True)[:20]
                entropy = -sum(p / sum(top) * math.log(p / sum(top)) for p in top)
                losses.append(-((entropy / math.log(20)) ** 1.5) * logs[label])
            else:
                losses.append(-0.8 * logs[label] - 0.2 * mean(logs))
    assert_close(built.loss(), mean(losses))


@pytest.mark.parametrize(
    "section", [{"loss_type": "eaft"}, {"loss_type": "asft"}, {"label_smoothing": 0.2}, None]
)
def test_sfts_losses_count_the_routers_loss_of_a_mixture_of_experts_once(
    tmp_path: Path, section: Row | None
) -> None:
    built = Built(make_sibling("qwen3_moe", tmp_path / "moe"), tmp_path / "run", "sft", WORDS, section)
    trainer, inputs = built.trainer, {key: value for key, value in built.batch.items() if key != "labels"}
    with torch.no_grad():
        router = float(built.model(**inputs, output_router_logits=True).aux_loss)
        trainer.router_aux_loss_coef = 0.0
        alone = built.loss()
        trainer.router_aux_loss_coef = 0.5
        assert router > 0.1
        assert_close(built.loss(), alone + 0.5 * router)
        trainer.current_gradient_accumulation_steps = 4
        found = []
        for trainer.router_aux_loss_coef in (0.5, 0.0):
            inputs = trainer._prepare_inputs(built.batch)
            found.append(float(trainer.compute_loss(built.model, inputs, num_items_in_batch=torch.tensor(9))))
        assert_close(found[0] - found[1], 0.5 * router / 4)


def test_sfts_loss_is_the_mean_over_the_assistants_words(tiny_base: Path, tmp_path: Path) -> None:
    built = Built(tiny_base, tmp_path / "run", "sft", WORDS, None)
    built.move()
    words = [word for row in built.encoded for word in learned(built.model, row).tolist()]
    assert_close(built.loss(), -mean(words))


@pytest.mark.parametrize("cap", [None, 5.5])
def test_gradient_differences_loss_is_section_4s(tiny_base: Path, tmp_path: Path, cap: float | None) -> None:
    section = {"retain_weight": 0.6, "forget_loss_cap": cap}
    built = Built(tiny_base, tmp_path / "run", "gradient_difference", WORDS, section)
    built.move()
    total, count = 0.0, 0
    for row in (pair["forget"] for pair in built.encoded):
        words = -learned(built.model, row)
        total += len(words) * min(float(words.mean()), cap or math.inf)
        count += len(words)
    assert_close(built.loss(), -total / count + 0.6 * retained(built))


def test_npos_loss_is_equation_3(tiny_base: Path, tmp_path: Path) -> None:
    built = Built(tiny_base, tmp_path / "run", "npo", WORDS, {"retain_weight": 0.6, "beta": 0.4})
    built.move()
    losses = []
    for row in (pair["forget"] for pair in built.encoded):
        ratio = float(learned(built.model, row).sum() - learned(built.before, row).sum())
        losses.append(-2 / 0.4 * math.log(sigmoid(-0.4 * ratio)))
    assert_close(built.loss(), mean(losses) + 0.6 * retained(built))


def retained(built: Built) -> float:
    """The next-token loss of the rows to keep, in nats per token."""
    return -mean([word for pair in built.encoded for word in learned(built.model, pair["retain"]).tolist()])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillations_loss_is_gkds_equation_1(tiny_base: Path, tmp_path: Path, beta: float) -> None:
    section = {"teacher": str(tiny_base), "beta": beta, "temperature": 1.7}
    built = Built(tiny_base, tmp_path / "run", "distillation", WORDS, section)
    built.move()
    total, count = 0.0, 0
    for row in built.encoded:
        ids, labelled = answers(row)
        p, q = (softened(model, ids, 1.7)[labelled] for model in (built.before, built.model))
        m = beta * p + (1 - beta) * q
        by_beta = {0.0: kl(p, q), 1.0: kl(q, p)}
        total += by_beta.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
        count += int(labelled.sum())
    assert_close(built.loss(), total / count)


@torch.no_grad()
def softened(model: Any, ids: list[int], temperature: float) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return (logits.double() / temperature).softmax(-1)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p * (p / q).log()).sum())


class Codes(Grader):
    """A reward that differs from answer to answer: the mean code of its characters."""

    name = "codes"

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [sum(map(ord, sample.completion)) / 1000 / (1 + len(sample.completion)) for sample in samples]


class Answered(Built):
    """Answers of the policy at the start, in groups of four to a prompt, and the loss of the moved policy on them.

    Attributes:
        rewards: Of each answer, ``[prompts, 4]`` float64.
        answers: Ids of each prompt and of its answer.
        old: Log-probabilities of each answer's tokens under the policy that wrote it.
    """

    def __init__(self, base: Path, folder: Path, algorithm: str, section: Row) -> None:
        settings = {"num_generations": 4, "max_completion_length": 5, "num_iterations": 2, **section}
        super().__init__(base, folder, algorithm, PROMPTS, settings, [Codes()])
        torch.manual_seed(3)
        self.move(0.1, seed=2)  # so that the penalty of the reference is not 0
        self.batch = self.trainer._generate_and_score_completions(list(self.batch))
        self.batch.setdefault("num_items_in_batch", self.batch["completion_mask"].sum())
        self.answers = [
            (ids[mask == 1].tolist(), answer[answered == 1].tolist())
            for ids, mask, answer, answered in zip(
                *(
                    self.batch[f"{part}_{kind}"]
                    for part in ("prompt", "completion")
                    for kind in ("ids", "mask")
                ),
                strict=True,
            )
        ]
        texts = self.tokenizer.batch_decode([answer for _, answer in self.answers], skip_special_tokens=True)
        samples = [Sample(prompt=[], completion=text, row={}) for text in texts]
        self.rewards = torch.tensor(Codes().grade(samples), dtype=torch.float64).view(-1, 4)
        self.old = [token_log_probs(self.model, *one) for one in self.answers]
        self.move()
        self.now = [token_log_probs(self.model, *one) for one in self.answers]
        self.start = [token_log_probs(self.before, *one) for one in self.answers]

    def loss(self) -> Any:
        return self.trainer._compute_loss(self.model, self.batch).item()


def clipped(ratio: torch.Tensor, advantage: Any, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grouped(rewards: torch.Tensor, scale: str) -> list[float]:
    """GRPO's advantages, each answer against its group."""
    found = []
    for group in rewards.tolist():
        centre = mean(group)
        deviation = math.sqrt(sum((r - centre) ** 2 for r in group) / (len(group) - 1))
        everything = rewards.flatten().tolist()
        spread = math.sqrt(sum((r - mean(everything)) ** 2 for r in everything) / (len(everything) - 1))
        divisor = {"group": deviation + 1e-4, "batch": spread + 1e-4, "none": 1.0}[scale]
        found += [(r - centre) / divisor for r in group]
    return found


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpos_loss_is_clipped_by_token_with_the_groups_advantage(
    tiny_base: Path, tmp_path: Path, scale: str
) -> None:
    section = {"scale_rewards": scale, "beta": 0.2, "epsilon": 0.1, "epsilon_high": 0.15}
    built = Answered(tiny_base, tmp_path / "run", "grpo", section)
    advantages = grouped(built.rewards, scale)
    torch.testing.assert_close(
        built.batch["advantages"].double(), torch.tensor(advantages).double(), rtol=1e-4, atol=1e-5
    )
    words: list[float] = []
    for now, old, start, advantage in zip(built.now, built.old, built.start, advantages, strict=True):
        ratio, divergence = torch.exp(now - old), torch.exp(start - now) - (start - now) - 1
        words += (-clipped(ratio, advantage, 0.1, 0.15) + 0.2 * ratio * divergence).tolist()
    assert_close(built.loss(), mean(words))


def test_gspos_loss_is_clipped_by_answer(tiny_base: Path, tmp_path: Path) -> None:
    built = Answered(tiny_base, tmp_path / "run", "gspo", {"epsilon": 0.01, "epsilon_high": 0.02})
    losses = []
    for now, old, advantage in zip(built.now, built.old, grouped(built.rewards, "group"), strict=True):
        losses.append(-float(clipped(torch.exp((now - old).mean()), advantage, 0.01, 0.02)))
    assert_close(built.loss(), mean(losses))


def test_rloos_loss_has_the_other_answers_mean_as_its_baseline(tiny_base: Path, tmp_path: Path) -> None:
    built = Answered(tiny_base, tmp_path / "run", "rloo", {"beta": 0.2, "epsilon": 0.1, "epsilon_high": 0.15})
    kls = torch.tensor([float((o - s).sum()) for o, s in zip(built.old, built.start, strict=True)])
    rewards = built.rewards - 0.2 * kls.double().view(-1, 4)
    losses = []
    for number, (now, old) in enumerate(zip(built.now, built.old, strict=True)):
        group = rewards[number // 4].tolist()
        own = group.pop(number % 4)
        ratio = torch.exp((now - old).sum())
        losses.append(-float(clipped(ratio, own - mean(group), 0.1, 0.15)))
    assert_close(built.loss(), mean(losses))


@pytest.mark.parametrize("whiten", [True, False])
def test_ppos_loss_is_equation_9_with_gaes_advantages(tiny_base: Path, tmp_path: Path, whiten: bool) -> None:
    section = {
        "beta": 0.2,
        "epsilon": 0.1,
        "epsilon_high": 0.15,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "whiten_advantages": whiten,
        "entropy_coef": 0.05,
        "cliprange_value": 0.02,
    }
    built = Answered(tiny_base, tmp_path / "run", "ppo", section)
    critic = built.trainer.critic
    with torch.no_grad():
        torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(5))
    # The head is 0 at the start, and so were the values when the answers were written.
    assert not built.batch["old_values"].any()
    words: list[float] = []
    advantages: list[list[float]] = []
    for number, (old, start) in enumerate(zip(built.old, built.start, strict=True)):
        rewards = (-0.2 * (old - start)).tolist()
        rewards[-1] += float(built.rewards.flatten()[number])
        advantages.append(
            [sum((0.9 * 0.8) ** k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        )
    flat = [a for one in advantages for a in one]
    centre, spread = mean(flat), math.sqrt(mean([(a - mean(flat)) ** 2 for a in flat]) + 1e-8)
    for (prompt, answer), now, old, returns in zip(
        built.answers, built.now, built.old, advantages, strict=True
    ):
        with torch.no_grad():
            ids = torch.tensor([prompt + answer])
            values = critic(ids, torch.ones_like(ids), len(answer))[0].double()
        target = torch.tensor(returns).double()
        used = (target - centre) / spread if whiten else target
        errors = torch.maximum((values - target) ** 2, (values.clamp(-0.02, 0.02) - target) ** 2) / 2
        probabilities = distributions(built.model, prompt + answer)[-len(answer) :]
        entropy = -(probabilities.exp() * probabilities).sum(-1)
        words += (-clipped(torch.exp(now - old), used, 0.1, 0.15) - 0.05 * entropy + errors).tolist()
    assert_close(built.loss(), mean(words))
