"""Evaluation scores the answer after a thought; the thought is stored, and an unfinished one is an empty answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import LoadedModel, load_model, load_tokenizer
from gym_fed.cli.main import app
from gym_fed.data.encoding import prompt_ids
from gym_fed.evaluation.generation import exact_match, greedy_ids
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.evaluation.grading import grade
from gym_fed.evaluation.records.reader import read_record
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults, Figure, SampleResult, TaskResult
from gym_fed.evaluation.retention import retention_scores
from gym_fed.evaluation.scoring.local import LocalScorer
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult
from gym_fed.serving.chat.local_writer import open_engine, open_plain
from gym_fed.serving.chat.session import ChatSession, ThoughtText
from gym_fed.serving.forward.multi_variant import MultiVariantModel
from gym_fed.serving.reasoning.answers import AnswerReader
from tests.support.thinking_model import HARMONY, THINK, Learned, learn, template_file

THOUGHT, ANSWER = "2+2 is 4.", "It is 4."
RAW = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
QUESTION = [{"role": "user", "content": "sum"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = learn(
        tmp_path_factory.mktemp("thinker"),
        load_tokenizer("gym-nano"),
        [
            Learned("qwen3", "sum", RAW),
            Learned("qwen3", "plain", "No thought."),
            Learned("qwen3", "why", f"<think>\n{THOUGHT * 4}\n</think>\n\n{ANSWER}"),
            Learned("gptoss", "sum", f"<|channel|>final<|message|>{ANSWER}"),
        ],
        (*THINK, *HARMONY),
    )
    (made / "chat_template.jinja").write_text(template_file("qwen3").read_text())
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


class Seen(Grader):
    """Records the samples that it is given."""

    name = "seen"

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        self.samples += samples
        return [float(sample.completion == ANSWER) for sample in samples]


def test_graders_get_the_answer_and_the_thought_is_stored_with_it(loaded: LoadedModel) -> None:
    seen = Seen()
    grades = grade(loaded.model, loaded.tokenizer, [{"prompt": "sum"}, {"prompt": "plain"}], [seen])
    assert [(one.completion, one.thought) for one in seen.samples] == [(ANSWER, THOUGHT), ("No thought.", "")]
    assert (grades.means["seen"], grades.unfinished) == (0.5, 0)


def test_an_unfinished_thought_is_graded_as_an_empty_answer_and_counted(loaded: LoadedModel) -> None:
    seen = Seen()
    grades = grade(loaded.model, loaded.tokenizer, [{"prompt": "sum"}], [seen], max_new_tokens=6)
    assert [(one.completion, one.thought) for one in seen.samples] == [("", THOUGHT[:4])]
    assert (grades.means["seen"], grades.unfinished) == (0.0, 1)


def test_exact_match_compares_the_answer_without_its_thought(loaded: LoadedModel) -> None:
    rows = [{"messages": [*QUESTION, {"role": "assistant", "content": ANSWER}]}]
    assert exact_match(loaded.model, loaded.tokenizer, rows) == 1.0


def answers(loaded: LoadedModel, *requests: AnswerRequest, parser: str = "qwen3") -> list[AnswerResult]:
    with MultiVariantModel(loaded.model) as served:
        scorer = LocalScorer(served, loaded.tokenizer, {"base": None})
        assert scorer.identity == {"reasoning": parser}
        found = dict(scorer.answers(requests))
    return [found[place]["base"] for place in range(len(requests))]


def prompt(loaded: LoadedModel, **variables: Any) -> tuple[int, ...]:
    return tuple(
        loaded.tokenizer.apply_chat_template(
            QUESTION, add_generation_prompt=True, return_dict=True, **variables
        )["input_ids"]
    )


def test_a_suite_scores_the_answer_and_its_stop_texts_do_not_end_the_thought(loaded: LoadedModel) -> None:
    ids = prompt(loaded)
    whole, stopped, cut = answers(
        loaded,
        AnswerRequest(ids, max_tokens=100),
        AnswerRequest(ids, until=("4", "\n"), max_tokens=100),
        AnswerRequest(ids, max_tokens=6),
    )
    assert (whole.text, whole.thought, whole.finish_reason) == (ANSWER, THOUGHT, "stop")
    assert (stopped.text, stopped.thought) == ("It is ", THOUGHT)
    assert (cut.text, cut.thought, cut.is_unfinished) == ("", THOUGHT[:4], True)
    assert (whole.is_unfinished, stopped.is_unfinished) == (False, False)


def test_an_answer_straight_in_the_final_channel_is_scored_without_its_header(
    loaded: LoadedModel, folder: Path
) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template_file("gptoss").read_text()
    loaded = replace(loaded, tokenizer=tokenizer)
    (found,) = answers(loaded, AnswerRequest(prompt(loaded), max_tokens=40), parser="openai_gptoss")
    assert (found.text, found.thought, found.is_unfinished) == (ANSWER, "", False)


def test_retention_reads_the_answer_of_a_model_whose_thought_is_longer_than_its_room(
    loaded: LoadedModel,
) -> None:
    reader, question = AnswerReader(loaded.tokenizer), {"role": "user", "content": "why"}
    assert reader.without_thought(prompt(loaded)) == list(prompt(loaded, enable_thinking=False))
    closed = reader.without_thought(prompt_ids(loaded.tokenizer, [question]))
    (written,) = greedy_ids(loaded.model, loaded.tokenizer, [closed], max_new_tokens=24)
    answer = loaded.tokenizer.decode(written.ids).strip()
    assert answer
    rows = [{"messages": [question, {"role": "assistant", "content": answer}]}]
    assert retention_scores(loaded.model, loaded.tokenizer, rows).right == [True]


def test_a_prompt_without_the_template_is_not_searched_for_thoughts(loaded: LoadedModel) -> None:
    (found,) = answers(loaded, AnswerRequest(prompt(loaded)[:-1], max_tokens=3))
    assert (found.thought, found.is_unfinished) == ("", False)


def test_a_record_keeps_the_thought_and_the_count_of_unfinished_ones(tmp_path: Path) -> None:
    samples = (
        SampleResult(0, "0" * 64, "sum", (), (), ANSWER, (1,), "4", {"exact_match": 1.0}, thought=THOUGHT),
        SampleResult(1, "1" * 64, "sum", (), (), "", (1,), "4", {"exact_match": 0.0}, 0, (), "2+2", True),
    )
    figures = {"exact_match": Figure(0.5, None, 2)}
    task = TaskResult("sums", "1", 0, figures, samples, "lock")
    results = EvalResults("m", {"model": "x"}, {"sums": task}, 1.0, {"suite": "own"})
    read = read_record(write_record(results, tmp_path))
    assert read.tasks["sums"].samples == samples
    assert read.tasks["sums"].num_unfinished == 1


def say(session: ChatSession, text: str) -> tuple[str, str]:
    parts = list(session.say(text))
    thought = "".join(part for part in parts if isinstance(part, ThoughtText))
    return thought, "".join(part for part in parts if not isinstance(part, ThoughtText))


def test_a_chat_keeps_the_answer_alone_with_the_engine_and_with_transformers(folder: Path) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 100}
    for opened in (open_engine(str(folder), device="cpu"), open_plain(str(folder), device="cpu")):
        session = ChatSession(opened, sampling=sampling)
        assert say(session, "sum") == (THOUGHT, ANSWER)
        assert session.messages[-1] == {"role": "assistant", "content": ANSWER}
        session.reset()
        assert say(session, "plain") == ("", "No thought.")
        opened.close()


def test_gym_chat_prints_the_thought_apart_from_the_answer(folder: Path) -> None:
    words = [
        "chat",
        str(folder),
        "--prompt",
        "sum",
        "--temperature",
        "0",
        "--max-tokens",
        "100",
        "--device",
        "cpu",
    ]
    shown = CliRunner().invoke(app, words)
    assert (shown.exit_code, shown.stdout) == (0, f"{ANSWER}\n")
    assert THOUGHT in shown.stderr
    assert "think>" not in shown.stdout + shown.stderr
    report = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (report["answer"], report["reasoning"]) == (ANSWER, THOUGHT)
