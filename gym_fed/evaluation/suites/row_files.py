"""Read rows of evaluation sets: JSON Lines, JSON, CSV and Parquet, bounded in size, in the layouts that their authors
publish."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.data.bounded import delimiter_of

Row = dict[str, Any]

MAX_BYTES = 1 << 30
"""Maximum size in bytes of a decompressed file; the largest split of a suite has tens of megabytes."""
MAX_ROWS = 2_000_000
"""Maximum number of rows of a Parquet file, in which equal rows need almost no space; the same as for samples of a
record."""
_ROWS_AT_ONCE = 1024
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


def read_rows(file: Path) -> list[Row]:
    """Read all rows of a file, whose suffix determines the format; a JSON file is a list, or has one under
    ``examples``.

    Raises:
        GymError: ``DATA_INVALID`` with the line that cannot be read; ``TOO_LARGE``.
    """
    try:
        if file.name.endswith(".parquet"):
            return _parquet(file)
        if file.name.endswith(".csv"):
            return _csv(_text(file))
        if file.name.endswith(".json"):
            return _json(file)
        return list(_lines(file))
    except GymError:
        raise
    except (OSError, ValueError, EOFError, RecursionError, csv.Error) as error:
        raise _refused(file, str(error)) from error


def rows_bytes(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode rows as JSON Lines, independent of their source format."""
    return "".join(
        json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n" for row in rows
    ).encode("utf-8", "surrogatepass")


def rows_sha256(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of rows in their order."""
    return hashlib.sha256(rows_bytes(rows)).hexdigest()


def _text(file: Path) -> str:
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _too_large(file)
    return data.decode("utf-8-sig")


def _lines(file: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _refused(file, f"line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise _refused(file, f"line {number}: not a JSON object")
        yield row


def _json(file: Path) -> list[Row]:
    document = json.loads(_text(file))
    rows = document.get("examples") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _refused(
            file, "neither a list of objects, nor an object with such a list under the key examples"
        )
    return rows


def _csv(text: str) -> list[Row]:
    """Read CSV rows by header; without one (four answers and a letter, as in MMLU) columns are ``0``, ``1``, ..."""
    lines = list(
        csv.reader(text.splitlines(keepends=True), delimiter=delimiter_of(".csv", text), strict=True)
    )
    if not lines:
        return []
    head, body = lines[0], lines[1:]
    if len(head) == 6 and head[5] in ("A", "B", "C", "D"):
        head, body = [str(number) for number in range(6)], lines
    for number, line in enumerate(body, start=2):
        if len(line) != len(head):
            raise ValueError(f"row {number}: {counted(len(line), 'column')} instead of {len(head)}")
    return [dict(zip(head, line, strict=True)) for line in body]


def _parquet(file: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            groups = range(opened.metadata.num_row_groups)
            stated = sum(opened.metadata.row_group(group).total_byte_size for group in groups)
            if stated > MAX_BYTES:
                raise _too_large(file)
            # A value shared by many rows is stored once in the file, but once per row in memory.
            at_once = max(1, min(_ROWS_AT_ONCE, MAX_BYTES // max(1, stated)))
            rows: list[Row] = []
            num_bytes = 0
            for batch in opened.iter_batches(at_once):
                if len(rows) + batch.num_rows > MAX_ROWS:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"{file}: more than {MAX_ROWS} rows",
                        "use the file of one split",
                    )
                batch_rows: list[Row] = batch.to_pylist()
                num_bytes += sum(len(str(row)) for row in batch_rows)
                if num_bytes > MAX_BYTES:
                    raise _too_large(file)
                rows += batch_rows
            return rows
    except pyarrow.ArrowException as error:
        raise _refused(file, f"not a Parquet file: {error}") from error


def _refused(file: Path, why: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"{file}: {plain(why, 200)}", "fetch it again, or correct it")


def _too_large(file: Path) -> GymError:
    return GymError(ErrorCode.TOO_LARGE, f"{file}: more than {MAX_BYTES} bytes", "use the file of one split")


_LETTERS = "ABCD"
_GSM8K_EXAMPLES = 1000
_MBPP_TEST, _MBPP_EXAMPLES = range(11, 511), (2, 3, 4)


@dataclass(frozen=True)
class TaskRows:
    """Rows by split, with their origin.

    Attributes:
        splits: Rows by split, as the definition names it.
        source: A description of the origin: files, or a repository and its commit.
        partial: The differences from the full set; empty if there are none.
    """

    splits: Mapping[str, list[Row]]
    source: str
    partial: str = ""


Reader = Callable[[Path, str], TaskRows | None]


def mmlu(folder: Path, subset: str) -> TaskRows | None:
    """Read ``test/SUBJECT_test.csv`` and ``dev/SUBJECT_dev.csv``: question, four answers, a letter or index."""
    splits: dict[str, list[Row]] = {}
    files = []
    for split in ("test", "dev"):
        if (file := _first(folder, f"{split}/{subset}_{split}.csv")) is not None:
            splits[split] = [_mmlu_row(file, row, subset) for row in read_rows(file)]
            files.append(file)
    if not splits:
        return None
    if "test" not in splits:
        return TaskRows(
            {"test": splits["dev"]},
            ", ".join(map(str, files)),
            "the 5 dev rows of the subject, without examples",
        )
    return TaskRows(splits, ", ".join(map(str, files)))


def _mmlu_row(file: Path, row: Row, subset: str) -> Row:
    values = list(row.values())
    answer = str(values[-1]).strip()
    if len(values) != 6 or answer not in ("A", "B", "C", "D", "0", "1", "2", "3"):
        raise _unlike(file, "a question, four answers and a letter A to D (or 0 to 3)")
    gold = _LETTERS.index(answer) if answer in _LETTERS else int(answer)
    return {"question": values[0], "subject": subset, "choices": values[1:5], "answer": gold}


def arc(folder: Path, subset: str) -> TaskRows | None:
    """Read ``test.jsonl`` of query, choices and gold, or AllenAI's ``ARC-Easy-Test.jsonl``."""
    own = subset.lower().replace("-", "_")
    file = _first(folder, f"{subset}-Test.jsonl", f"{subset}/{subset}-Test.jsonl")
    if file is None and folder.name == own:
        file = _first(folder, "test.jsonl")
    if file is None:
        return None
    return TaskRows(
        {"test": [_arc_row(file, row) for row in read_rows(file)]}, str(file), "the test split only"
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
    question_text = str(row["query"]).removeprefix("Question: ").removesuffix("\nAnswer:")
    return {
        "question": question_text,
        "choices": {"text": row["choices"], "label": labels},
        "answerKey": labels[row["gold"]],
    }


def winogrande(folder: Path, subset: str) -> TaskRows | None:
    """Read AllenAI's ``dev.jsonl`` with sentence and options, or a file with two beginnings and their continuation."""
    file = _first(folder, "dev.jsonl")
    if file is None:
        return None
    return TaskRows({"validation": [_winogrande_row(file, row) for row in read_rows(file)]}, str(file))


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


def truthfulqa(folder: Path, subset: str) -> TaskRows | None:
    """Read ``TruthfulQA.csv``; its columns of answers are split at semicolons."""
    file = _first(folder, "TruthfulQA.csv")
    if file is None:
        return None
    rows = [_truthfulqa_row(file, row) for row in read_rows(file)]
    return TaskRows({"validation": rows}, str(file), "mc1 and mc2 are made from the columns of the CSV file")


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


def gsm8k(folder: Path, subset: str) -> TaskRows | None:
    """Read ``train.jsonl`` and ``test.jsonl``, or test on training rows that are not few-shot examples."""
    test = _first(folder, "test.jsonl")
    train = _first(folder, "train.jsonl")
    if train is None:
        return None
    rows = [_gsm8k_row(train, row) for row in read_rows(train)]
    if test is not None:
        tests = [_gsm8k_row(test, row) for row in read_rows(test)]
        return TaskRows({"test": tests, "train": rows}, f"{test}, {train}")
    if len(rows) <= _GSM8K_EXAMPLES:
        raise _unlike(train, f"more than {_GSM8K_EXAMPLES} rows, where there is no test.jsonl")
    split = {"train": rows[:_GSM8K_EXAMPLES], "test": rows[_GSM8K_EXAMPLES:]}
    return TaskRows(
        split,
        str(train),
        f"train rows from number {_GSM8K_EXAMPLES} on; models may have been trained on them",
    )


def _gsm8k_row(file: Path, row: Row) -> Row:
    if not {"question", "answer"} <= row.keys():
        raise _unlike(file, "question and answer")
    return {"question": str(row["question"]), "answer": str(row["answer"])}


def mbpp(folder: Path, subset: str) -> TaskRows | None:
    """Read ``mbpp.jsonl``; as its authors count, rows 11 to 510 are the test split."""
    file = _first(folder, "mbpp.jsonl")
    if file is None:
        return None
    rows = {int(row["task_id"]): row for row in read_rows(file)}
    if missing := [number for number in (*_MBPP_EXAMPLES, *_MBPP_TEST) if number not in rows]:
        raise _unlike(file, f"task_id 1 to 510 ({missing[0]} is missing)")
    tests = [rows[number] for number in _MBPP_TEST]
    return TaskRows({"test": tests, "prompt": [rows[number] for number in _MBPP_EXAMPLES]}, str(file))


def humaneval(folder: Path, subset: str) -> TaskRows | None:
    """Read ``HumanEval.jsonl.gz``."""
    file = _first(folder, "HumanEval.jsonl.gz", "HumanEval.jsonl")
    return None if file is None else TaskRows({"test": read_rows(file)}, str(file))


def bbh(folder: Path, subset: str) -> TaskRows | None:
    """Read ``TASK.json`` with examples of input and target."""
    file = _first(folder, f"{subset}.json", f"bbh/{subset}.json")
    if file is None:
        return None
    rows = [{"input": str(row["input"]), "target": str(row["target"])} for row in read_rows(file)]
    return TaskRows({"test": rows}, str(file))


def ifeval(folder: Path, subset: str) -> TaskRows | None:
    """Read ``ifeval_input_data.jsonl``, or ``input_data.jsonl`` as Google Research publishes it."""
    file = _first(folder, "ifeval_input_data.jsonl", "input_data.jsonl")
    return None if file is None else TaskRows({"train": read_rows(file)}, str(file))


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
"""Readers by dataset; the Hub's files are read for all others."""


def folders(data: Path, dataset: str) -> list[Path]:
    """Return the folders to search for a dataset: subfolders with its name, or ``data`` itself if it has that name."""
    named = re.compile(rf"{re.escape(dataset)}([-_].*)?", re.IGNORECASE)
    inside = sorted(folder for folder in data.iterdir() if folder.is_dir() and named.fullmatch(folder.name))
    return [*inside, data] if named.fullmatch(data.resolve().name) else inside


def _first(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _unlike(file: Path, expected: str) -> GymError:
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{file}: unexpected layout; a row must have {expected}",
        "use the file as its authors published it, or fetch the set",
    )


def read_split(dataset: str, split: str, files: Iterable[Path]) -> list[Row]:
    """Read a split from the Hub's files, in their order; for MBPP's prompts, the examples that the harness shows."""
    rows = [row for file in files for row in read_rows(file)]
    if dataset == "mbpp" and split == "prompt":
        by_number: dict[Any, Row] = {row["task_id"]: row for row in rows}
        return [by_number[number] for number in _MBPP_EXAMPLES if number in by_number]
    return rows
