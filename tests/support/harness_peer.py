"""Public tasks over rows of this machine, and lm-eval's own model (`HFLM`) on the same requests."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXACT = {
    "metric": "exact_match",
    "aggregation": "mean",
    "higher_is_better": True,
    "ignore_case": True,
    "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
}


@dataclass(frozen=True)
class LocalTask:
    """A task of rows in memory."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    version: str = "1"
    lock: str = "test"

    @property
    def config(self) -> dict[str, Any]:
        return {"custom_dataset": self._dataset, "test_split": "test", **self.settings}

    def _dataset(self, **_: Any) -> Any:
        from datasets import Dataset

        return {"test": Dataset.from_list([dict(row) for row in self.rows])}


def public_tasks(data: Path, rows: int) -> list[LocalTask]:
    """ARC-Easy, WinoGrande, TruthfulQA (mc1, mc2), MMLU, GSM8K and BBH, the first so many rows of each."""
    accuracy: list[dict[str, Any]] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    normed = [*accuracy, {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}]
    choice = {"output_type": "multiple_choice", "num_fewshot": 0}
    return [
        LocalTask(
            "arc_easy",
            _lines(data / "arc_easy" / "test.jsonl", rows),
            {
                **choice,
                "doc_to_text": "{{query}}\nAnswer:",
                "doc_to_target": "gold",
                "doc_to_choice": "choices",
                "metric_list": normed,
            },
        ),
        LocalTask(
            "winogrande",
            _lines(data / "winogrande" / "dev.jsonl", rows),
            {
                **choice,
                "doc_to_text": _gold,
                "doc_to_target": _continuation,
                "doc_to_choice": _options,
                "metric_list": accuracy,
            },
        ),
        *_truthfulqa(data / "truthfulqa" / "TruthfulQA.csv", rows, {**choice, "metric_list": accuracy}),
        LocalTask(
            "mmlu",
            _mmlu(data / "mmlu_dev" / "dev", rows),
            {
                **choice,
                "num_fewshot": 2,
                "fewshot_split": "test",
                "fewshot_config": {"sampler": "first_n"},
                "doc_to_text": "{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n"
                "D. {{choices[3]}}\nAnswer:",
                "doc_to_target": "answer",
                "doc_to_choice": ["A", "B", "C", "D"],
                "metric_list": accuracy,
            },
        ),
        LocalTask(
            "gsm8k",
            _lines(data / "gsm8k" / "train.jsonl", rows),
            {
                "output_type": "generate_until",
                "num_fewshot": 1,
                "fewshot_split": "test",
                "doc_to_text": "Question: {{question}}\nAnswer:",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": 64},
                "metric_list": [_EXACT],
                "filter_list": [
                    {
                        "name": "strict-match",
                        "filter": [
                            {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                            {"function": "take_first"},
                        ],
                    },
                    {
                        "name": "flexible-extract",
                        "filter": [
                            {
                                "function": "regex",
                                "group_select": -1,
                                "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)",
                            },
                            {"function": "take_first"},
                        ],
                    },
                ],
            },
        ),
        LocalTask(
            "bbh",
            json.loads((data / "bbh" / "boolean_expressions.json").read_text())["examples"][:rows],
            {
                "output_type": "generate_until",
                "num_fewshot": 0,
                "doc_to_text": "Q: {{input}}\nA:",
                "doc_to_target": "{{target}}",
                "generation_kwargs": {"until": ["Q:", "\n\n"], "max_gen_toks": 24},
                "metric_list": [_EXACT],
            },
        ),
    ]


def _lines(path: Path, rows: int) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(rows), strict=False)]


def _gold(row: Mapping[str, Any]) -> int:
    return int(row["gold"])


def _continuation(row: Mapping[str, Any]) -> str:
    return str(row["continuation"])


def _options(row: Mapping[str, Any]) -> list[str]:
    return list(row["context_options"])


def _mmlu(folder: Path, rows: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                choices = [row[f"choice{number}"] for number in range(4)]
                found.append({"question": row["question"], "choices": choices, "answer": int(row["answer"])})
        if len(found) >= rows:
            break
    return found[:rows]


def _truthfulqa(path: Path, rows: int, settings: Mapping[str, Any]) -> list[LocalTask]:
    one: list[dict[str, Any]] = []
    with path.open(encoding="utf-8", newline="") as file:
        for row, _ in zip(csv.DictReader(file), range(rows), strict=False):
            right = [text.strip() for text in row["Correct Answers"].split(";") if text.strip()]
            wrong = [text.strip() for text in row["Incorrect Answers"].split(";") if text.strip()]
            best = row["Best Answer"].strip()
            one.append(
                {
                    "question": row["Question"],
                    "mc1": [best, *wrong],
                    "mc2": [*right, *wrong],
                    "labels": [1] * len(right) + [0] * len(wrong),
                }
            )
    shared = {**settings, "doc_to_text": "Q: {{question}}\nA:", "doc_to_target": 0}
    return [
        LocalTask("truthfulqa_mc1", one, {**shared, "doc_to_choice": "{{mc1}}"}),
        LocalTask(
            "truthfulqa_mc2", one, {**shared, "doc_to_choice": "{{mc2}}", "process_results": _mass_of_right}
        ),
    ]


def _mass_of_right(row: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    import math

    weights = [math.exp(logprob) for logprob, _ in results]
    right = sum(weight for weight, label in zip(weights, row["labels"], strict=True) if label)
    return {"acc": right / sum(weights)}


def hflm_samples(
    model: Any, tokenizer: Any, tasks: Sequence[LocalTask], *, template: bool = False, batch_size: int = 8
) -> dict[str, dict[str, Any]]:
    """What lm-eval itself makes of a model: its results with samples, of ``simple_evaluate`` with ``HFLM``."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    made = [ConfigurableTask(config={**task.config, "task": task.name}) for task in tasks]
    found = simple_evaluate(lm, tasks=made, bootstrap_iters=0, apply_chat_template=template, log_samples=True)
    return dict(found)


Difference = Callable[[str], None]
