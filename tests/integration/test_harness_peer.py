"""Row by row, our choices, log-likelihoods and texts are those of lm-eval's own `HFLM`, on its public tasks.

The whole comparison prints its table: ``pytest -s -m slow tests/integration/test_harness_peer.py``. SmolLM2 takes part
where ``$GYM_SMOLLM2``, or ``runs/smollm2`` (``benchmarks/_smollm2.py`` writes it), has SmolLM2-135M-Instruct.

HFLM sums the exponentials of a vocabulary in float32. Of SmolLM2's 49,152 that alone is off by 1e-4 nats in a text of
20 tokens; its option ``softmax_dtype`` sums them in float64. Weights and forwards stay in float32.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.data.chat_templates.choice import use_chat_template
from tests.support.harness_peer import CHOICES, TEXTS, Compared, compared, public_tasks, subjects

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.shared

STORIES, SMOLLM2 = "stories260K", "SmolLM2-135M-Instruct"
NATS = 1e-4
BBH = [
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "navigate",
    "snarks",
]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, shared_folder: Path) -> LoadedModel:
    """In float32, by name."""
    folder = shared_folder / "models" / STORIES
    if request.param == SMOLLM2:
        folder = Path(os.environ.get("GYM_SMOLLM2", "runs/smollm2"))
        if not (folder / "config.json").is_file():
            pytest.skip(f"{folder}: no SmolLM2-135M-Instruct; name its folder in $GYM_SMOLLM2")
    loaded = load_model(str(folder))
    loaded.model.float().eval()
    return LoadedModel(loaded.model, loaded.tokenizer, request.param)


stories = pytest.mark.parametrize("model", [STORIES], indirect=True)
both = pytest.mark.parametrize("model", [STORIES, SMOLLM2], indirect=True)


@stories
def test_two_rows_of_each_family_are_answered_as_by_hflm(model: LoadedModel, shared_folder: Path) -> None:
    names = [*CHOICES, *subjects(1), *TEXTS, "bbh_zeroshot_snarks", "bbh_fewshot_navigate"]
    found = _compared(model, shared_folder, names, 2)
    assert {one.task: one.rows for one in found} == dict.fromkeys(names, 2)
    assert sum(one.cut for one in found) >= 6, "examples of gsm8k, mbpp and bbh do not fit into 512 tokens"


@stories
def test_rows_behind_five_examples_are_answered_as_by_hflm(model: LoadedModel, shared_folder: Path) -> None:
    found = _compared(model, shared_folder, ["arc_easy", "winogrande"], 2, examples=5)
    assert all(one.rows == 2 for one in found)
    assert max(one.cut for one in found) == 2


@stories
def test_rows_in_a_chat_template_are_answered_as_by_hflm(model: LoadedModel, shared_folder: Path) -> None:
    """Not gym-nano's: of its prompts HFLM cuts the last token, which ends with a line, and scores another text."""
    tokenizer = use_chat_template(copy.deepcopy(model.tokenizer), "chatml")
    loaded = LoadedModel(model.model, tokenizer, "chatml")
    names = ["arc_easy", "winogrande", "bbh_zeroshot_snarks"]
    found = _compared(loaded, shared_folder, names, 2, template=True)
    assert sum(one.rows for one in found) == 6


@pytest.mark.slow  # 50 rows of a task by both sides: up to 5 minutes each for SmolLM2 on one core
@pytest.mark.timeout(1800)
@both
@pytest.mark.parametrize("name", [*CHOICES, "mmlu", *TEXTS, "bbh"])
def test_fifty_rows_are_answered_as_by_hflm(model: LoadedModel, name: str, shared_folder: Path) -> None:
    names, rows = [name], 50
    if name == "mmlu":
        names, rows = subjects(10), 5
    elif name == "bbh":
        names, rows = [f"bbh_{kind}_{one}" for one in BBH for kind in ("zeroshot", "fewshot")], 3
    found = _compared(model, shared_folder, names, rows)
    assert sum(one.rows for one in found) >= 50
    _show(model, name, found)


@pytest.mark.slow  # five times the tokens
@pytest.mark.timeout(1800)
@both
@pytest.mark.parametrize("name", ["arc_easy", "winogrande"])
def test_fifty_rows_behind_five_examples_are_answered_as_by_hflm(
    model: LoadedModel, name: str, shared_folder: Path
) -> None:
    found = _compared(model, shared_folder, [name], 50, examples=5)
    assert found[0].rows == 50
    _show(model, f"{name}, 5 examples", found)


@pytest.mark.slow  # as above
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [SMOLLM2], indirect=True)
@pytest.mark.parametrize("name", ["arc_easy", "winogrande", "bbh_zeroshot_snarks"])
def test_fifty_rows_in_a_chat_template_are_answered_as_by_hflm(
    model: LoadedModel, name: str, shared_folder: Path
) -> None:
    found = _compared(model, shared_folder, [name], 50, template=True)
    assert found[0].rows == 50
    _show(model, f"{name}, chat template", found)


def _compared(
    loaded: Any,
    shared: Path,
    names: list[str],
    rows: int,
    *,
    examples: int | None = None,
    template: bool = False,
) -> list[Compared]:
    tasks = public_tasks(shared / "data", names, rows, examples=examples)
    found = compared(loaded.model, loaded.tokenizer, tasks, template=template)
    for one in found:
        assert one.parted is None, one
        assert one.equal + one.ties == one.rows
        assert one.largest <= NATS, one
    return found


def _show(loaded: LoadedModel, name: str, found: list[Compared]) -> None:
    rows, equal, ties = (sum(getattr(one, key) for one in found) for key in ("rows", "equal", "ties"))
    cut, largest = sum(one.cut for one in found), max(one.largest for one in found)
    print(
        f"\n{loaded.name} | {name} | {rows} rows | {equal} equal | {ties} ties | {cut} cut | {largest:.1e} nats"
    )
