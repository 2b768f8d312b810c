"""Learning from a teacher: its distribution token by token, or the answers it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick

ROWS = generate("upper", 160)
HELD_OUT = generate("upper", 40, split="heldout")
STUDENT = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
}


@pytest.fixture(scope="module")
def teacher() -> LoadedModel:
    return load_model("gym-nano")


def config(folder: Path, algorithm: str = "distillation", **changes: Any) -> TrainingConfig:
    section = {"teacher": "gym-nano", **changes.pop("section", {})}
    values = {
        "algorithm": algorithm,
        algorithm: section,
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def new_student(folder: Path, **changes: Any) -> TrainingConfig:
    return config(folder, model_init=STUDENT, **changes)


@torch.inference_mode()
def kl_to_teacher(model: Any, teacher: LoadedModel, rows: list[dict[str, Any]]) -> float:
    """Mean KL(teacher || student) in nats at the tokens of the answers, in float64."""
    from gym_fed.data.encoding import IGNORED, encode_rows

    total, count = 0.0, 0
    for row in encode_rows(teacher.tokenizer, rows, max_length=64):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        theirs, ours = (m(ids).logits[0, :-1].double().log_softmax(-1) for m in (teacher.model, model))
        kl = (theirs.exp() * (theirs - ours)).sum(-1)[labels != IGNORED]
        total, count = total + float(kl.sum()), count + len(kl)
    return total / count


def test_the_student_comes_closer_to_the_teacher_on_rows_it_has_not_seen(
    teacher: LoadedModel, tmp_path: Path
) -> None:
    from gym_fed.training.model.loading import load_for_training

    settings = new_student(tmp_path / "run", max_steps=60, per_device_train_batch_size=16)
    before = kl_to_teacher(load_for_training(settings)[0], teacher, HELD_OUT)
    result = Trainer(settings).train(ROWS)
    after = kl_to_teacher(result.model, teacher, HELD_OUT)
    assert before > 5
    assert after < before - 1.5
    assert result.num_tokens > 0


def test_the_loss_is_the_divergence_at_the_answers_tokens(teacher: LoadedModel, tmp_path: Path) -> None:
    rows = ROWS[:8]
    changes = {"max_steps": 1, "learning_rate": 1e-9}
    student, _ = _student(tmp_path)
    result = Trainer(new_student(tmp_path / "run", **changes)).train(rows)
    assert result.losses[0] == pytest.approx(kl_to_teacher(student, teacher, rows), rel=1e-4)
    halves = Trainer(
        new_student(
            tmp_path / "halves", **changes, per_device_train_batch_size=4, gradient_accumulation_steps=2
        )
    ).train(rows)
    assert halves.losses[0] == pytest.approx(result.losses[0], rel=1e-4)


def _student(folder: Path) -> tuple[Any, Any]:
    from gym_fed.training.model.loading import load_for_training

    return load_for_training(new_student(folder))


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_is_the_papers(beta: float, temperature: float) -> None:
    from gym_fed.training.algorithms.distillation.distillation import divergence

    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 11, generator=generator)
    q, p = ((logits.double() / temperature).softmax(-1) for logits in (student, teacher))

    def kl(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a * (a / b).log()).sum())

    mixture = beta * p + (1 - beta) * q
    expected = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, mixture) + (1 - beta) * kl(q, mixture))
    assert float(divergence(student, teacher, beta=beta, temperature=temperature)) == pytest.approx(
        expected, rel=1e-5
    )


def test_every_setting_changes_what_is_learnt(tmp_path: Path) -> None:
    sections: list[dict[str, Any]] = [
        {},
        {"beta": 0.5},
        {"temperature": 2.0},
        {"teacher_dtype": "bfloat16"},
        {"lmbda": 1.0, "max_completion_length": 8},
        {"lmbda": 1.0, "max_completion_length": 4},
    ]
    losses = [
        tuple(Trainer(new_student(tmp_path / str(i), section=section, max_steps=2)).train(ROWS[:16]).losses)
        for i, section in enumerate(sections)
    ]
    assert len(set(losses)) == len(losses)
    assert all(math.isfinite(loss) for run in losses for loss in run)


@pytest.mark.slow  # generates in every step
def test_a_student_is_corrected_on_its_own_words(teacher: LoadedModel, tmp_path: Path) -> None:
    student = _damaged()
    rows = ROWS[:64]
    before = kl_to_teacher(student.model, teacher, HELD_OUT)
    settings = config(
        tmp_path / "run",
        section={"lmbda": 1.0, "max_completion_length": 12},
        max_steps=15,
        learning_rate=5e-4,
    )
    Trainer(settings, model=student.model, tokenizer=student.tokenizer).train(rows)
    after = kl_to_teacher(student.model, teacher, HELD_OUT)
    assert after < 0.4 * before


def _damaged(noise: float = 0.07) -> LoadedModel:
    """gym-nano with noise on every weight: it has forgotten much, but not how to speak."""
    student = load_model("gym-nano")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return student


def test_a_stopped_on_policy_run_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"section": {"lmbda": 0.5, "max_completion_length": 6}}
    whole = Trainer(new_student(tmp_path / "whole", **changes)).train(ROWS[:32])
    seen: list[int] = []
    with pytest.raises(GymError, match="stopped at step 2 of 4"):
        Trainer(
            new_student(tmp_path / "part", **changes),
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 2,
        ).train(ROWS[:32])
    assert Trainer(new_student(tmp_path / "part", **changes)).train(ROWS[:32]).losses == whole.losses


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one more token than gym-nano."""
    loaded = load_model("gym-nano")
    loaded.tokenizer.add_tokens(["<|extra|>"])
    loaded.model.resize_token_embeddings(len(loaded.tokenizer))
    folder = tmp_path_factory.mktemp("models") / "more"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def test_a_teacher_of_another_vocabulary_is_refused_with_both_sizes(
    other_vocabulary: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        GymError,
        match=r"has 263 tokens, but the student has 262; id 262 is '<\|extra\|>' for the teacher and no token",
    ) as caught:
        Trainer(new_student(tmp_path / "run", section={"teacher": str(other_vocabulary)})).train(ROWS)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "sequence_distillation" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_the_first_token_that_differs_is_named() -> None:
    from gym_fed.training.algorithms.distillation.distillation import _first_difference

    ours = {"a": 0, "b": 1, "c": 2}
    assert _first_difference(ours, dict(ours)) is None
    assert (
        _first_difference(ours, {"a": 0, "c": 1, "b": 2})
        == "id 1 is 'c' for the teacher and 'b' for the student"
    )
    assert (
        _first_difference(ours, {"a": 0, "b": 1})
        == "id 2 is no token for the teacher and 'c' for the student"
    )
    assert (
        _first_difference(ours, {**ours, "\u202e": 7})
        == r"id 7 is '\\u202e' for the teacher and no token for the student"
    )


def test_the_columns_that_are_compared_are_tokens_with_a_row_in_both_models() -> None:
    from gym_fed.training.algorithms.distillation.distillation import token_columns

    class Tokens:
        def __init__(self, *ids: int) -> None:
            self._ids = ids

        def get_vocab(self) -> dict[str, int]:
            return {f"t{number}": number for number in self._ids}

    assert token_columns(Tokens(0, 2, 1), 8) == slice(3)
    assert token_columns(Tokens(0, 1, 2), 2) == slice(2)
    assert token_columns(Tokens(0, 1, 5, 9), 8) == [0, 1, 5]


def test_a_teacher_without_a_row_for_a_token_of_the_data_is_refused(tmp_path: Path) -> None:
    loaded = load_model("gym-nano")
    loaded.model.config.pad_token_id = None
    loaded.model.resize_token_embeddings(90)
    loaded.model.save_pretrained(tmp_path / "t")
    loaded.tokenizer.save_pretrained(tmp_path / "t")
    with pytest.raises(GymError, match=r"has 90 embeddings, but the data contains token id \d+") as caught:
        Trainer(new_student(tmp_path / "run", section={"teacher": str(tmp_path / "t")})).train(ROWS)
    assert caught.value.code is ErrorCode.MODEL_INVALID


def padded_model(rows: int, folder: Path) -> Path:
    """gym-nano with ``rows`` of embeddings, of which those behind its tokens are large random numbers."""
    loaded = load_model("gym-nano")
    known = len(loaded.tokenizer)
    loaded.model.resize_token_embeddings(rows)
    torch.manual_seed(rows)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[known:] = torch.randn(
            rows - known, loaded.model.config.hidden_size
        )
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "sizes",
    [(262, 300), (300, 262), *(pytest.param(s, marks=pytest.mark.slow) for s in ((280, 300), (300, 300)))],
)
@pytest.mark.parametrize("beta", quick([0.0, 0.3, 1.0], 0.3))
def test_padding_rows_of_embeddings_are_left_out_of_both_distributions(
    sizes: tuple[int, int], beta: float, tmp_path: Path
) -> None:
    from gym_fed.data.encoding import IGNORED, encode_rows

    student, teacher = (padded_model(size, tmp_path / name) for size, name in zip(sizes, "st", strict=True))
    loaded = load_model(str(student))
    with torch.no_grad():  # otherwise both would be the same
        loaded.model.model.norm.weight.mul_(0.7)
    loaded.model.save_pretrained(student)
    total, count = 0.0, 0
    theirs = load_model(str(teacher)).model
    for row in encode_rows(loaded.tokenizer, ROWS[:8], max_length=64):
        ids = torch.tensor([row["input_ids"]])
        with torch.inference_mode():
            logits = [model(ids).logits[0, :-1, :262].double() for model in (loaded.model, theirs)]
        q, p = (one.softmax(-1) for one in logits)
        m = beta * p + (1 - beta) * q
        first = (p * (p / (q if beta == 0 else m)).log()).sum(-1)
        second = (q * (q / (p if beta == 1 else m)).log()).sum(-1)
        divergences = first if beta == 0 else second if beta == 1 else beta * first + (1 - beta) * second
        labelled = torch.tensor(row["labels"][1:]) != IGNORED
        total, count = total + float(divergences[labelled].sum()), count + int(labelled.sum())
    section = {"teacher": str(teacher), "beta": beta, "lmbda": 0.0}
    settings = config(tmp_path / "run", model=str(student), max_steps=1, section=section)
    result = Trainer(settings).train(ROWS[:8])
    assert result.losses[0] == pytest.approx(total / count, rel=1e-4)


def test_a_student_with_more_padding_than_its_teacher_never_writes_a_padding_token(tmp_path: Path) -> None:
    student = padded_model(400, tmp_path / "s")
    section = {"teacher": "gym-nano", "lmbda": 1.0, "max_completion_length": 8, "temperature": 5.0}
    result = Trainer(config(tmp_path / "run", model=str(student), max_steps=2, section=section)).train(ROWS)
    assert result.steps == 2


def test_what_cannot_be_distilled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="no such folder"):
        Trainer(new_student(tmp_path / "run", section={"teacher": "./nowhere"}))
    with pytest.raises(GymError, match=r"lmbda: 0.5 needs rows with a prompt, which packing"):
        Trainer(new_student(tmp_path / "run", section={"lmbda": 0.5}, packing=True))
    with pytest.raises(GymError, match="row 1 has no prompt"):
        Trainer(new_student(tmp_path / "run", section={"lmbda": 0.5})).train([{"text": "only words"}])
    assert not (tmp_path / "run").exists()


def sequence(folder: Path, **changes: Any) -> TrainingConfig:
    section = {"max_completion_length": 16, **changes.pop("section", {})}
    return config(folder, "sequence_distillation", section=section, **changes)


@pytest.mark.slow  # two models in every step
def test_a_student_learns_to_answer_as_its_teacher_does(teacher: LoadedModel, tmp_path: Path) -> None:
    from gym_fed.evaluation import exact_match
    from gym_fed.evaluation.generation import generate_batch

    prompts = [row["messages"][:-1] for row in HELD_OUT]
    answers = generate_batch(teacher.model, teacher.tokenizer, prompts, max_new_tokens=16)
    wanted = [
        {"messages": [*prompt, {"role": "assistant", "content": answer}]}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    student = _damaged(0.1)
    before = exact_match(student.model, student.tokenizer, wanted, max_new_tokens=16)
    wrong = [  # the rows' own answers are not what is learnt
        {"messages": [*row["messages"][:-1], {"role": "assistant", "content": "?"}]} for row in ROWS
    ]
    settings = sequence(tmp_path / "run", max_steps=30, learning_rate=5e-4)
    Trainer(settings, model=student.model, tokenizer=student.tokenizer).train(wrong)
    after = exact_match(student.model, student.tokenizer, wanted, max_new_tokens=16)
    assert after > before + 0.3


def test_the_teachers_answers_are_kept_and_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {
        "model_init": STUDENT,
        "section": {"temperature": 0.7, "teacher_batch_size": 16},
    }
    whole = Trainer(sequence(tmp_path / "whole", **changes)).train(ROWS[:40])
    assert "teacher: 40 of 40 answers" in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "whole/teacher.jsonl").read_text().splitlines()]
    assert len(lines) == len({json.dumps(row["messages"][:-1]) for row in ROWS[:40]})
    assert set(lines[0]) == {"key", "prompt", "answer", "finished"}
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    seen: list[int] = []
    with pytest.raises(GymError, match="stopped at step 2 of 4"):
        Trainer(
            sequence(tmp_path / "part", **changes),
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 2,
        ).train(ROWS[:40])
    monkeypatch.setattr(
        "gym_fed.training.algorithms.distillation.sequence_distillation.TeacherAnswers._generate",
        lambda *a: pytest.fail("the teacher generated again"),
    )
    assert Trainer(sequence(tmp_path / "part", **changes)).train(ROWS[:40]).losses == whole.losses


def test_a_teacher_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.data.rows import as_kind
    from gym_fed.training.algorithms.distillation.sequence_distillation import TeacherAnswers

    rows = as_kind(ROWS[:40], "prompt")
    settings = sequence(
        tmp_path / "run", model_init=STUDENT, section={"temperature": 0.7, "teacher_batch_size": 8}
    )
    whole = TeacherAnswers(settings).of(rows)
    (tmp_path / ".run.teacher.jsonl").unlink()
    answer, calls = TeacherAnswers._answer, []

    def stops(self: TeacherAnswers, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, *args)

    monkeypatch.setattr(TeacherAnswers, "_answer", stops)
    with pytest.raises(KeyboardInterrupt):
        TeacherAnswers(settings).of(rows)
    with (tmp_path / ".run.teacher.jsonl").open("a") as file:
        file.write('{"key": "torn')
    monkeypatch.setattr(TeacherAnswers, "_answer", answer)
    assert TeacherAnswers(settings).of(rows) == whole
    kept = [json.loads(line) for line in (tmp_path / ".run.teacher.jsonl").read_text().splitlines()]
    assert {line["answer"] for line in kept} == {line["answer"] for line in whole}


def test_answers_that_do_not_end_are_left_out_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = sequence(
        tmp_path / "run", model_init=STUDENT, section={"max_completion_length": 6}, max_steps=1
    )
    result = Trainer(settings).train(ROWS[:60])
    assert "which were truncated" in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run/teacher.jsonl").read_text().splitlines()]
    assert {line["finished"] for line in lines} == {True, False}
    assert result.steps == 1
    with pytest.raises(GymError, match="the teacher finished none of its") as caught:
        Trainer(sequence(tmp_path / "none", model_init=STUDENT, section={"max_completion_length": 1})).train(
            ROWS
        )
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_the_settings_of_the_teacher_decide_its_answers(tmp_path: Path) -> None:
    from gym_fed.training.algorithms.distillation.sequence_distillation import TeacherAnswers

    rows = [{"prompt": [{"role": "user", "content": "describe the sea"}]}, {"prompt": "plain words"}]
    sections: list[dict[str, Any]] = [{}, {"temperature": 1.5}, {"teacher_dtype": "bfloat16"}]
    runs = [
        TeacherAnswers(sequence(tmp_path / str(i), model_init=STUDENT, section=section, seed=seed)).of(rows)
        for i, (section, seed) in enumerate([*((s, 0) for s in sections), ({"temperature": 1.5}, 1), ({}, 1)])
    ]
    assert len({json.dumps([line["answer"] for line in run]) for run in (runs[0], runs[1], runs[3])}) == 3
    assert runs[0] == runs[4], "greedy answers do not depend on the seed"
    assert runs[0][0]["key"] != runs[2][0]["key"]
