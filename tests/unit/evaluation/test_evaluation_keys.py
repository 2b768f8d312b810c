"""What the results of a run are keyed by: whatever changes an answer changes the key, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.base.models import nano_path
from gym_fed.evaluation import evaluator
from gym_fed.evaluation.evaluator import Evaluator
from gym_fed.evaluation.harness.preparation import computed
from gym_fed.evaluation.harness.sources import PreparedRequest
from gym_fed.evaluation.records.document import record_id
from gym_fed.evaluation.running import RunningFile
from gym_fed.evaluation.scoring.models import open_models
from gym_fed.evaluation.scoring.scorer import AnswerResult, Continuation, Loglikelihood

PART = Continuation((1,), (2,))

TASK = """
task: sums
dataset_kwargs: {data_files: {test: test.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
metric_list: [{metric: exact_match}]
"""


def key(model: Path, task: str | Path = "tiny_capital", **options: Any) -> str:
    made = Evaluator([str(task)], str(model), **options)
    with open_models(made.model) as models:
        (identity,) = made._identities(models, made._specs).values()
    return record_id(identity)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano_path(), tmp_path / "model"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def append(path: Path) -> None:
    path.write_text(f"{path.read_text()} ")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda f: edit(f / "config.json", rms_norm_eps=0.5), id="config"),
        pytest.param(lambda f: edit(f / "config.json", max_position_embeddings=64), id="context"),
        pytest.param(
            lambda f: edit(f / "config.json", rope_parameters={"rope_theta": 7.0, "rope_type": "default"}),
            id="rope",
        ),
        pytest.param(
            lambda f: edit(f / "tokenizer.json", normalizer={"type": "Lowercase"}), id="tokenizer's rules"
        ),
        pytest.param(lambda f: edit(f / "tokenizer_config.json", bos_token="<|im_start|>"), id="first token"),
        pytest.param(lambda f: append(f / "chat_template.jinja"), id="chat template"),
    ],
)
def test_a_model_of_the_same_tensors_that_computes_otherwise_has_another_key(
    change: Callable[[Path], None], folder: Path
) -> None:
    before = key(folder)
    change(folder)
    assert key(folder) != before


def test_name_version_and_padding_of_a_model_are_not_in_the_key(folder: Path, tmp_path: Path) -> None:
    before = key(folder)
    edit(folder / "config.json", transformers_version="0.0.0")
    edit(folder / "tokenizer_config.json", padding_side="left")
    assert key(folder.rename(tmp_path / "other")) == before


def test_limit_examples_template_and_dtype_are_in_the_key(folder: Path) -> None:
    from gym_fed.evaluation.scoring.models import ModelRequest

    plain = key(folder, "tiny_choice")
    keys = [
        key(folder, "tiny_choice", num_examples=5),
        key(folder, "tiny_choice", num_fewshot=1),
        key(folder, "tiny_choice", apply_chat_template=True),
    ]
    made = Evaluator(["tiny_choice"], ModelRequest(str(folder), dtype="bfloat16"))
    with open_models(made.model) as models:
        keys.append(record_id(next(iter(made._identities(models, made._specs).values()))))
    assert len({plain, *keys}) == 5


def test_a_task_file_and_its_rows_are_in_the_key(folder: Path, tmp_path: Path) -> None:
    task, rows = tmp_path / "sums.yaml", tmp_path / "test.jsonl"
    task.write_text(TASK)
    rows.write_text('{"q": "1+1=", "a": "2"}\n')
    keys = [key(folder, task)]
    rows.write_text('{"q": "1+1=", "a": "3"}\n')
    keys.append(key(folder, task))
    task.write_text(TASK.replace("{{q}}", "Sum: {{q}}"))
    keys.append(key(folder, task))
    assert len(set(keys)) == 3


def test_another_version_of_the_harness_has_another_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(folder)
    monkeypatch.setattr(evaluator, "harness_version", lambda: "lm-eval 9.9.9")
    assert key(folder) != before


@pytest.mark.parametrize("greedy", [(True, True), (True, False), (False, True)])
def test_parts_of_a_text_are_summed_and_greedy_only_together(greedy: tuple[bool, bool]) -> None:
    found = [
        Loglikelihood(-1.5, greedy[0], 2),
        Loglikelihood(-0.25, greedy[1], 3),
        Loglikelihood(-9.0, True, 0),
    ]
    scorer: Any = SimpleNamespace(
        loglikelihoods=lambda parts, done: ((place, {"base": found[place]}) for place in (0, 2, 1)),
        answers=lambda asked: iter(()),
    )
    first = PreparedRequest(("texts", 0, 0, 0), (PART, PART))
    second = PreparedRequest(("texts", 1, 0, 0), (PART,))
    outcomes = {request.key: by_model["base"] for request, by_model in computed(scorer, [first, second])}
    assert outcomes == {
        first.key: Loglikelihood(-1.75, all(greedy), 5),
        second.key: Loglikelihood(-9.0, True, 0),
    }


def test_outcomes_of_an_evaluation_that_was_killed_are_read_again(tmp_path: Path) -> None:
    outcomes = {
        ("sums", 0, 0, 0): Loglikelihood(-1.5, True, 2),
        ("sums", 0, 1, 0): AnswerResult("four", (4, 5), "stop", 1, (0.5, 0.25)),
    }
    with RunningFile(tmp_path, {"base": {"model": "a"}}) as running:
        for request, outcome in outcomes.items():
            running.add(request, {"base": outcome})
    with RunningFile(tmp_path, {"base": {"model": "a"}}) as resumed:
        assert resumed.outcomes == {"base": outcomes}
