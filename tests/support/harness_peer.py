"""The harness's own definitions of public tasks on rows of this machine, by us and by lm-eval's own model (`HFLM`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gym_fed.evaluation.suites.eval_task import EvalTask
from gym_fed.evaluation.suites.tasks import tasks_of

TIE = 1e-2
"""Nats between the likeliest and the second token within which texts may part."""
_CODE = ("humaneval", "mbpp")
_SUBJECTS = (
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "college_biology",
    "computer_security",
    "econometrics",
    "high_school_geography",
    "moral_scenarios",
    "philosophy",
    "world_religions",
)

CHOICES = ("arc_easy", "winogrande", "truthfulqa_mc1", "truthfulqa_mc2")
"""Tasks of log-likelihoods; MMLU's subjects are beside them."""
TEXTS = ("gsm8k", *_CODE)
"""Tasks of generated texts; BBH's tasks are beside them."""


def subjects(count: int) -> list[str]:
    """Some of MMLU's tasks, each of whose 5 dev rows are here."""
    return [f"mmlu_{name}" for name in _SUBJECTS[:count]]


def public_tasks(
    data: Path, names: Sequence[str], rows: int, *, examples: int | None = None, max_tokens: int = 24
) -> list[EvalTask]:
    """The first so many rows of some tasks, as the harness defines them.

    Args:
        data: The folder of sets.
        names: As for ``gym eval``.
        rows: Most of each task.
        examples: So many, of the set's last rows, before every question; None: as the definition says.
        max_tokens: Of a generated text. Code is not run: the texts are compared.
    """
    return [_changed(task, examples, max_tokens) for task in tasks_of(names, data, rows)]


def _changed(task: EvalTask, examples: int | None, max_tokens: int) -> EvalTask:
    config = dict(task.config)
    if "generation_kwargs" in config:
        config["generation_kwargs"] = {**config["generation_kwargs"], "max_gen_toks": max_tokens}
    if task.name in _CODE:
        config["process_results"] = _not_run
    if examples is not None:
        config["num_fewshot"] = examples
        config["fewshot_config"] = {"samples": [dict(row) for row in task.rows[task.split][-4 * examples :]]}
    return replace(task, config=config)


def _not_run(row: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
    return {"pass@1": 0.0}


@dataclass
class Compared:
    """What two sides said to the rows of one task.

    Attributes:
        equal: Rows with the same choice and metrics, or the same text.
        largest: Difference of two log-likelihoods, in nats; 0 for texts.
        ties: Rows whose texts part after two tokens that are within ``TIE`` of one another.
        parted: What differs otherwise, in words.
        cut: Rows of which the beginning did not fit into the model's context.
    """

    task: str
    rows: int = 0
    equal: int = 0
    largest: float = 0.0
    ties: int = 0
    parted: list[str] | None = None
    cut: int = 0

    def differs(self, what: str) -> None:
        """Note a row that is not equal."""
        self.parted = [*(self.parted or []), what]


def compared(
    model: Any, tokenizer: Any, tasks: Sequence[EvalTask], *, template: bool = False
) -> list[Compared]:
    """Both sides on every row of some tasks, HFLM with its rows alone in a batch of 8."""
    theirs = hflm_samples(model, tokenizer, tasks, template=template)
    ours = our_samples(model, tokenizer, tasks, template=template)
    return [_compared(task.name, ours[task.name], theirs[task.name], tokenizer) for task in tasks]


def our_samples(
    model: Any, tokenizer: Any, tasks: Sequence[EvalTask], *, template: bool = False
) -> dict[str, Sequence[Any]]:
    """Samples by task, of our scorer."""
    from gym_fed.evaluation.harness.preparation import Preparation, computed
    from gym_fed.evaluation.harness.sources import PromptOptions
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    limits = {task.limit for task in tasks}
    assert len(limits) == 1
    with MultiVariantModel(model) as served:
        scorer = LocalScorer(served, tokenizer, {"base": None})
        options = PromptOptions(limit=limits.pop(), apply_chat_template=template)
        preparation = Preparation(tasks, tokenizer, scorer.max_length, options)
        found = {request.key: outcome["base"] for request, outcome in computed(scorer, preparation.requests)}
    return {name: result.samples for name, result in preparation.results(found).items()}


def hflm_samples(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[EvalTask],
    *,
    template: bool = False,
    batch_size: int = 8,
    softmax: str = "float64",
) -> dict[str, Sequence[Any]]:
    """Samples by task, of lm-eval's ``simple_evaluate`` with ``HFLM``."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=softmax)
    made = [ConfigurableTask(config={"num_fewshot": 0, **task.config}) for task in tasks]
    found: dict[str, Any] = simple_evaluate(
        lm,
        tasks=made,
        limit=tasks[0].limit,
        bootstrap_iters=0,
        apply_chat_template=template,
        fewshot_as_multiturn=template,
        log_samples=True,
        task_manager=TaskManager(include_defaults=False),  # reading all of the harness's files takes 10 s
    )
    return {name: list(samples) for name, samples in found["samples"].items()}


def _compared(task: str, ours: Sequence[Any], theirs: Sequence[Any], tokenizer: Any) -> Compared:
    found = Compared(task)
    by_row: dict[int, Any] = {}
    for sample in theirs:
        by_row.setdefault(sample["doc_id"], sample)  # of several filters the first
    assert sorted(by_row) == [sample.number for sample in ours]
    for mine in ours:
        other = by_row[mine.number]
        found.rows += 1
        found.cut += mine.cut > 0
        if mine.answer is None:
            _choices(found, mine, other)
        else:
            _texts(found, mine, other, tokenizer)
    return found


def _choices(found: Compared, mine: Any, other: Mapping[str, Any]) -> None:
    logprobs = [float(answer[0][0]) for answer in other["resps"]]
    asked = [context + continuation for context, continuation in other["arguments"]]
    assert [mine.prompt + choice for choice in mine.choices] == asked
    off = max(abs(one - their) for one, their in zip(mine.logprobs, logprobs, strict=True))
    found.largest = max(found.largest, off)
    same = _first_best(mine.logprobs) == _first_best(logprobs)
    metrics = {name: float(other[name]) for name in mine.metrics}
    if same and all(abs(metrics[name] - value) < 1e-4 for name, value in mine.metrics.items()):
        found.equal += 1
    else:
        found.differs(f"row {mine.number}: {mine.logprobs} {mine.metrics}, theirs {logprobs} {metrics}")


def _texts(found: Compared, mine: Any, other: Mapping[str, Any], tokenizer: Any) -> None:
    text = other["resps"][0][0]
    assert mine.prompt == other["arguments"][0][0]
    if mine.answer == text:
        found.equal += 1
    elif (margin := margin_at_parting(mine, text, tokenizer)) < TIE:
        found.ties += 1
    else:
        found.differs(f"row {mine.number}: {mine.answer!r}, theirs {text!r}, margin {margin}")


def margin_at_parting(mine: Any, text: str, tokenizer: Any) -> float:
    """By how many nats the first token that leads away from another text was likelier than the second likeliest."""
    for place in range(1, len(mine.token_ids) + 1):
        begun = tokenizer.decode(list(mine.token_ids[:place]), skip_special_tokens=True).rstrip("\ufffd")
        if not text.startswith(begun):
            return float(mine.margins[place - 1])
    return float(mine.margins[-1])  # theirs goes on where ours ends


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: (values[place], -place))
