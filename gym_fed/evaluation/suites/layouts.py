"""Readers for evaluation sets in the layouts published by their authors.

Each data set has a function that takes a folder and a subset and returns the splits it finds, or nothing. It also
returns what is missing of the whole set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.row_files import Row, read_rows

_LETTERS = "ABCD"
_GSM8K_EXAMPLES = 1000
_MBPP_TEST, _MBPP_EXAMPLES = range(11, 511), (2, 3, 4)


@dataclass(frozen=True)
class FoundRows:
    """Rows in a folder.

    Attributes:
        splits: Rows by split, as the definition names it.
        files: The files that were read.
        partial: The differences to the whole set; empty if there are none.
    """

    splits: Mapping[str, list[Row]]
    files: tuple[Path, ...]
    partial: str = ""


Reader = Callable[[Path, str], FoundRows | None]


def mmlu(folder: Path, subset: str) -> FoundRows | None:
    """``test/SUBJECT_test.csv`` and ``dev/SUBJECT_dev.csv``: question, four answers, a letter or a number from 0."""
    splits: dict[str, list[Row]] = {}
    files = []
    for split in ("test", "dev"):
        if (file := _first(folder, f"{split}/{subset}_{split}.csv")) is not None:
            splits[split] = [_mmlu_row(file, row, subset) for row in read_rows(file)]
            files.append(file)
    if not splits:
        return None
    if "test" not in splits:
        return FoundRows(
            {"test": splits["dev"]}, tuple(files), "the 5 dev rows of the subject, without examples"
        )
    return FoundRows(splits, tuple(files))


def _mmlu_row(file: Path, row: Row, subset: str) -> Row:
    values = list(row.values())
    answer = str(values[-1]).strip()
    if len(values) != 6 or answer not in ("A", "B", "C", "D", "0", "1", "2", "3"):
        raise _unlike(file, "a question, four answers and a letter A to D (or 0 to 3)")
    gold = _LETTERS.index(answer) if answer in _LETTERS else int(answer)
    return {"question": values[0], "subject": subset, "choices": values[1:5], "answer": gold}


def arc(folder: Path, subset: str) -> FoundRows | None:
    """``test.jsonl`` of query, choices and gold, or AllenAI's ``ARC-Easy-Test.jsonl``."""
    own = subset.lower().replace("-", "_")
    file = _first(folder, f"{subset}-Test.jsonl", f"{subset}/{subset}-Test.jsonl")
    if file is None and folder.name == own:
        file = _first(folder, "test.jsonl")
    if file is None:
        return None
    return FoundRows(
        {"test": [_arc_row(file, row) for row in read_rows(file)]}, (file,), "the test split only"
    )


def _arc_row(file: Path, row: Row) -> Row:
    question = row.get("question")
    if isinstance(question, dict) and isinstance(question.get("choices"), list):
        labels = [str(choice["label"]) for choice in question["choices"]]
        texts = [str(choice["text"]) for choice in question["choices"]]
        return {
            "question": question["stem"],
            "choices": {"text": texts, "label": labels},
            "answerKey": row["answerKey"],
        }
    if not {"query", "choices", "gold"} <= row.keys():
        raise _unlike(file, "query, choices and gold, or question.stem, question.choices and answerKey")
    labels = [chr(ord("A") + place) for place in range(len(row["choices"]))]
    if not 0 <= row["gold"] < len(labels):
        raise _unlike(file, "a gold that is the number of a choice")
    asked = str(row["query"]).removeprefix("Question: ").removesuffix("\nAnswer:")
    return {
        "question": asked,
        "choices": {"text": row["choices"], "label": labels},
        "answerKey": labels[row["gold"]],
    }


def winogrande(folder: Path, subset: str) -> FoundRows | None:
    """AllenAI's ``dev.jsonl`` of sentence and options, or one of two beginnings and their continuation."""
    file = _first(folder, "dev.jsonl")
    if file is None:
        return None
    return FoundRows({"validation": [_winogrande_row(file, row) for row in read_rows(file)]}, (file,))


def _winogrande_row(file: Path, row: Row) -> Row:
    if {"sentence", "option1", "option2", "answer"} <= row.keys():
        return {key: str(row[key]) for key in ("sentence", "option1", "option2", "answer")}
    options = row.get("context_options")
    first, second = map(str, options) if isinstance(options, list) and len(options) == 2 else ("", "")
    if first == second or row.get("gold") not in (0, 1):
        raise _unlike(file, "two context_options that differ, and gold 0 or 1")
    same = (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    start = first.rfind(" ", 0, next(same, min(len(first), len(second)))) + 1
    return {
        "sentence": f"{first[:start]}_ {str(row['continuation']).strip()}",
        "option1": first[start:],
        "option2": second[start:],
        "answer": str(row["gold"] + 1),
    }


def truthfulqa(folder: Path, subset: str) -> FoundRows | None:
    """``TruthfulQA.csv``; its columns of answers are split at semicolons."""
    file = _first(folder, "TruthfulQA.csv")
    if file is None:
        return None
    rows = [_truthfulqa_row(file, row) for row in read_rows(file)]
    return FoundRows({"validation": rows}, (file,), "mc1 and mc2 are made from the columns of the CSV file")


def _truthfulqa_row(file: Path, row: Row) -> Row:
    try:
        best = row["Best Answer"].strip()
        right, wrong = (_answers(row[f"{kind} Answers"]) for kind in ("Correct", "Incorrect"))
        question = row["Question"].strip()
    except KeyError as error:
        raise _unlike(file, "Question, Best Answer, Correct Answers and Incorrect Answers") from error
    return {
        "question": question,
        "mc1_targets": {"choices": [best, *wrong], "labels": [1, *[0] * len(wrong)]},
        "mc2_targets": {"choices": [*right, *wrong], "labels": [1] * len(right) + [0] * len(wrong)},
    }


def _answers(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(";") if part.strip()))


def gsm8k(folder: Path, subset: str) -> FoundRows | None:
    """``train.jsonl`` and ``test.jsonl``; without the second, rows of the first that are not few-shot examples."""
    test = _first(folder, "test.jsonl")
    train = _first(folder, "train.jsonl")
    if train is None:
        return None
    rows = [_gsm8k_row(train, row) for row in read_rows(train)]
    if test is not None:
        tests = [_gsm8k_row(test, row) for row in read_rows(test)]
        return FoundRows({"test": tests, "train": rows}, (test, train))
    if len(rows) <= _GSM8K_EXAMPLES:
        raise _unlike(train, f"more than {_GSM8K_EXAMPLES} rows, where there is no test.jsonl")
    split = {"train": rows[:_GSM8K_EXAMPLES], "test": rows[_GSM8K_EXAMPLES:]}
    return FoundRows(
        split, (train,), f"train rows from number {_GSM8K_EXAMPLES} on; models may have learnt them"
    )


def _gsm8k_row(file: Path, row: Row) -> Row:
    if not {"question", "answer"} <= row.keys():
        raise _unlike(file, "question and answer")
    return {"question": str(row["question"]), "answer": str(row["answer"])}


def mbpp(folder: Path, subset: str) -> FoundRows | None:
    """``mbpp.jsonl``: the rows 11 to 510 are the test split, as its authors count."""
    file = _first(folder, "mbpp.jsonl")
    if file is None:
        return None
    rows = {int(row["task_id"]): row for row in read_rows(file)}
    if missing := [number for number in (*_MBPP_EXAMPLES, *_MBPP_TEST) if number not in rows]:
        raise _unlike(file, f"task_id 1 to 510 ({missing[0]} is missing)")
    tests = [rows[number] for number in _MBPP_TEST]
    return FoundRows({"test": tests, "prompt": [rows[number] for number in _MBPP_EXAMPLES]}, (file,))


def humaneval(folder: Path, subset: str) -> FoundRows | None:
    """``HumanEval.jsonl.gz``."""
    file = _first(folder, "HumanEval.jsonl.gz", "HumanEval.jsonl")
    return None if file is None else FoundRows({"test": read_rows(file)}, (file,))


def bbh(folder: Path, subset: str) -> FoundRows | None:
    """``TASK.json`` with examples of input and target."""
    file = _first(folder, f"{subset}.json", f"bbh/{subset}.json")
    if file is None:
        return None
    rows = [{"input": str(row["input"]), "target": str(row["target"])} for row in read_rows(file)]
    return FoundRows({"test": rows}, (file,))


def ifeval(folder: Path, subset: str) -> FoundRows | None:
    """``ifeval_input_data.jsonl``, or ``input_data.jsonl`` as Google Research publishes it."""
    file = _first(folder, "ifeval_input_data.jsonl", "input_data.jsonl")
    return None if file is None else FoundRows({"train": read_rows(file)}, (file,))


READERS: Mapping[str, Reader] = {
    "mmlu": mmlu,
    "arc": arc,
    "winogrande": winogrande,
    "truthfulqa": truthfulqa,
    "gsm8k": gsm8k,
    "mbpp": mbpp,
    "humaneval": humaneval,
    "bbh": bbh,
    "ifeval": ifeval,
}
"""Readers by data set; the Hub's files are read for all others."""


def folders(data: Path, dataset: str) -> list[Path]:
    """Return the folders to search for a data set: those of its name, or the given one if it has the name."""
    named = re.compile(rf"{re.escape(dataset)}([-_].*)?", re.IGNORECASE)
    inside = sorted(folder for folder in data.iterdir() if folder.is_dir() and named.fullmatch(folder.name))
    return [*inside, data] if named.fullmatch(data.resolve().name) else inside


def _first(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _unlike(file: Path, expected: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{file}: is not laid out as expected: a row has {expected}",
        "give the file as its authors publish it, or fetch the set",
    )


def as_harness(dataset: str, split: str, rows: list[Row]) -> list[Row]:
    """Convert rows of the Hub's files to the form of the definitions: for MBPP the examples that the harness shows."""
    if dataset == "mbpp" and split == "prompt":
        by_number: dict[Any, Row] = {row["task_id"]: row for row in rows}
        return [by_number[number] for number in _MBPP_EXAMPLES if number in by_number]
    return rows
