"""Generate and compare a model's answers to rows with reference answers (`gym predict`).

::

    generated_predictions.jsonl    {"prompt", "predict", "label"} per row, in the order of the rows
    predict_results.json           written last: mean scores, and counts of rows by outcome
    predict.json                   digests of the inputs, so that only the same run resumes
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.config.predict import PredictConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, drop_torn_line, require_no_links, write_atomically
from gym_fed.core.text import counted
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.rows import MEDIA, Row, place_of

_BLOCK = re.compile(r"[a-zA-Z0-9+#&._%-]+|\s+|.", re.DOTALL)
_WORD = re.compile(r"([a-zA-Z0-9]+(?:\.[0-9]+)?%?)")
_SENTENCE_END = re.compile(
    r"\n|(?<=[。！？?])(?=[^”’])|(?<=\.{6})(?=[^”’])|(?<=…{2})(?=[^”’])|(?<=[。！？?][”’])(?=[^，。！？?])"
)
_TINY = 1e-8

ANSWERS, RESULTS, RUN = "generated_predictions.jsonl", "predict_results.json", "predict.json"
OnAnswers = Callable[[int, int], None]
"""Called with the number of answered rows and the total number of rows."""

_FREE_KEYS = {"output_dir", "device", "num_threads"}


@dataclass(frozen=True)
class _Question:
    """A row as a question: prompt ids, prompt text and reference answer."""

    ids: list[int]
    prompt: str
    label: str


def predict(
    config: PredictConfig,
    *,
    on_answers: OnAnswers | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Answer the rows of ``eval_data``; write answers and metrics to ``output_dir``.

    A stopped or killed run resumes after its last complete batch and gives the same answers.

    Args:
        on_answers: Called after every batch.
        should_stop: Called after every batch; True raises ``INTERRUPTED``.

    Returns:
        The contents of ``predict_results.json``.

    Raises:
        GymError: ``FILE_EXISTS`` for a finished run, a run with a different config or different rows, or links;
            ``DATA_INVALID`` if no row can be answered; ``INTERRUPTED``; errors from ``load_model``.
    """
    import torch

    from gym_fed.data.sources import source_rows

    folder = config.output_dir
    if (folder / RESULTS).is_file():
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{folder} contains finished predictions", "choose another output_dir"
        )
    require_no_links(folder)
    rows = [row for source in config.eval_data for _, row in source_rows(source)]
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model, tokenizer = _load(config)
    questions, dropped = _questions(config, tokenizer, rows)
    done = _open(folder, config, questions)
    began, first = time.monotonic(), done
    for start in range(done, len(questions), config.batch_size):
        batch = questions[start : start + config.batch_size]
        answers = _answers(model, tokenizer, config, [question.ids for question in batch], start)
        rows_of_batch = (
            {"prompt": question.prompt, "predict": answer, "label": question.label}
            for question, answer in zip(batch, answers, strict=True)
        )
        append_lines(folder / ANSWERS, (json.dumps(row, ensure_ascii=False) for row in rows_of_batch))
        done = start + len(batch)
        if on_answers is not None:
            on_answers(done, len(questions))
        if should_stop is not None and done < len(questions) and should_stop():
            raise GymError(
                ErrorCode.INTERRUPTED,
                f"stopped: answered {done} of {counted(len(questions), 'row')} in {folder}",
                "run the same command again to resume",
            )
    figures = _mean_similarity(folder / ANSWERS)
    seconds = time.monotonic() - began
    results: dict[str, Any] = {f"predict_{name}": value for name, value in figures.items()}
    results |= {
        "predict_samples": len(questions),
        "predict_rows": len(rows),
        "predict_dropped": dropped,
        "predict_runtime": round(seconds, 4),
        "predict_samples_per_second": round((len(questions) - first) / max(seconds, 1e-9), 4),
    }
    write_atomically(folder / RESULTS, f"{json.dumps(results, indent=4)}\n".encode())
    return results


def _mean_similarity(file: Path) -> dict[str, float]:
    """Return the means of ``similarity`` over a file of predictions."""
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    scores = [similarity(line["predict"], line["label"]) for line in lines]
    return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}


def _load(config: PredictConfig) -> tuple[Any, Any]:
    from gym_fed.base.modeling.adapters import in_order, merge_adapters, merged, read_adapter
    from gym_fed.base.models import load_model
    from gym_fed.data.chat_templates.choice import use_chat_template

    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    model, paths = loaded.model, [config.adapter] if isinstance(config.adapter, str) else config.adapter or []
    if paths:
        base = merged(model, config.model)
        chain = in_order([read_adapter(path, Path(path).expanduser()) for path in paths])
        model = merge_adapters(base, chain).eval()
    return model, use_chat_template(loaded.tokenizer, config.chat_template)


def _questions(
    config: PredictConfig, tokenizer: Any, rows: list[Row]
) -> tuple[list[_Question], dict[str, int]]:
    """Return the rows that can be answered, and the number of dropped rows by reason."""
    questions: list[_Question] = []
    dropped = {"without an answer": 0, "prompt longer than max_length": 0}
    for number, row in enumerate(rows, 1):
        question = _question(config, tokenizer, row, number)
        if question is None:
            dropped["without an answer"] += 1
        elif len(question.ids) > config.max_length:
            dropped["prompt longer than max_length"] += 1
        else:
            questions.append(question)
    dropped = {reason: count for reason, count in dropped.items() if count}
    if not questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"eval_data: no answer can be generated for {counted(len(rows), 'row')}: {reasons}",
            "use rows that end with an answer, or raise max_length",
        )
    return questions, dropped


def _question(config: PredictConfig, tokenizer: Any, row: Row, number: int) -> _Question | None:
    from gym_fed.data.encoding import encode_one, prompt_ids, require_chat_template
    from gym_fed.data.string_rows import as_turns

    (row,) = as_turns(tokenizer, [row])
    if (column := next((column for column in MEDIA if row.get(column)), None)) is not None:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place_of(row, number)} has {column}, but gym predict supports only text",
            "remove the row",
        )
    if "messages" in row:
        messages = row["messages"]
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            return None
        require_chat_template(tokenizer)
        thinking = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
        ids = tokenizer.apply_chat_template(
            messages[:-1], tools=row.get("tools"), add_generation_prompt=True, return_dict=True, **thinking
        )["input_ids"]
        labels = encode_one(tokenizer, row, mask_history=True)["labels"]
        label = tokenizer.decode(
            [i for i in labels if i != IGNORED], skip_special_tokens=config.skip_special_tokens
        )
    elif "completion" in row and isinstance(row.get("prompt"), str):
        ids, label = prompt_ids(tokenizer, row["prompt"]), str(row["completion"])
    else:
        return None
    if not label.strip():
        return None
    return _Question(list(ids), tokenizer.decode(ids, skip_special_tokens=False), label)


def _open(folder: Path, config: PredictConfig, questions: list[_Question]) -> int:
    """Start or resume in ``folder``; return the number of answered rows in complete batches."""
    values = config.model_dump(mode="json", exclude=_FREE_KEYS)
    rows = hashlib.sha256()
    for question in questions:
        rows.update(json.dumps([question.ids, question.label]).encode() + b"\n")
    inputs = {"config": values, "rows_sha256": rows.hexdigest()}
    file = folder / RUN
    if file.is_file():
        recorded = json.loads(file.read_text(encoding="utf-8"))
        if recorded != inputs:
            keys = [key for key in values if recorded["config"].get(key) != values[key]]
            difference = f"with a different {keys[0]}" if keys else "on different rows"
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{folder} contains unfinished predictions {difference}",
                "choose another output_dir, or delete that folder",
            )
    elif folder.exists() and any(folder.iterdir()):
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{folder} is not empty, but contains no predictions",
            "choose another output_dir",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{json.dumps(inputs)}\n".encode())
    return _whole_batches(folder / ANSWERS, config.batch_size, len(questions))


def _whole_batches(file: Path, size: int, total: int) -> int:
    """Return the number of lines to keep; an incomplete batch is dropped because it is sampled as a whole."""
    if not file.is_file():
        return 0
    drop_torn_line(file)
    lines = file.read_bytes().splitlines(keepends=True)  # str.splitlines would also split at other characters
    count = len(lines) if len(lines) == total else len(lines) // size * size
    if count < len(lines):
        write_atomically(file, b"".join(lines[:count]))
    return count


def _answers(
    model: Any, tokenizer: Any, config: PredictConfig, prompts: list[list[int]], start: int
) -> Iterator[str]:
    """Generate answers to one batch, sampled with ``seed`` and the index of its first row."""
    import torch
    from transformers import set_seed

    from gym_fed.evaluation.loss import padded

    set_seed(config.seed + start)
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id or 0
    device = next(model.parameters()).device
    drawn = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    with torch.inference_mode():
        out = model.generate(
            input_ids=padded(prompts, pad, left=True).to(device),
            attention_mask=padded([[1] * len(prompt) for prompt in prompts], 0, left=True).to(device),
            max_new_tokens=config.max_new_tokens,
            do_sample=config.do_sample,
            num_beams=config.num_beams,
            repetition_penalty=config.repetition_penalty,
            pad_token_id=pad,
            **(drawn if config.do_sample else dict.fromkeys(drawn)),
        )
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=config.skip_special_tokens)
    return (str(text) for text in texts)


def similarity(answer: str, reference: str) -> dict[str, float]:
    """Return ``rouge-1``, ``rouge-2``, ``rouge-l`` and ``bleu-4`` of an answer, from 0 to 100, rounded to 4 places."""
    ours, theirs = words(answer), words(reference)
    if any(ours) and any(theirs):
        scores = {f"rouge-{n}": _rouge_n(ours, theirs, n) for n in (1, 2)}
        scores["rouge-l"] = _f1(longest_common(ours, theirs), len(ours), len(theirs))
    else:
        scores = {"rouge-1": 0.0, "rouge-2": 0.0, "rouge-l": 0.0}
    scores["bleu-4"] = bleu_4(answer, reference)
    return {name: round(100 * value, 4) for name, value in scores.items()}


def words(text: str) -> list[str]:
    """Return the words of a text; a blank line between paragraphs is an empty word."""
    tokens: list[str] = []
    for block in _BLOCK.findall(text):
        if block.isspace():
            tokens += block
        else:
            tokens += [part for part in _WORD.split(block) if part]
    joined = " ".join(tokens).rstrip()
    sentences = [sentence for sentence in _SENTENCE_END.split(joined) if sentence]
    return [word for sentence in sentences for word in " ".join(sentence.split()).split(" ")]


def bleu_4(answer: str, reference: str) -> float:
    """Return the sentence BLEU of characters with n-grams up to 4, from 0 to 1."""
    precisions, halvings = [], 0
    for n in range(1, 5):
        ours, theirs = _counts(answer, n), _counts(reference, n)
        total, matches = max(1, sum(ours.values())), sum((ours & theirs).values())
        if n == 1 and matches == 0:
            return 0.0
        if matches == 0:
            halvings += 1
        precisions.append(matches / total if matches else 1 / (2**halvings * total))
    brevity = 1.0 if len(answer) > len(reference) else math.exp(1 - len(reference) / len(answer))
    return brevity * math.exp(math.fsum(math.log(p) for p in precisions) / 4)


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        corner = 0
        for j, other in enumerate(b, 1):
            corner, row[j] = row[j], corner + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def _rouge_n(ours: list[str], theirs: list[str], n: int) -> float:
    sets = [{tuple(part[i : i + n]) for i in range(len(part) - n + 1)} for part in (ours, theirs)]
    return _f1(len(sets[0] & sets[1]), len(sets[0]), len(sets[1]))


def _f1(common: int, ours: int, theirs: int) -> float:
    precision, recall = common / ours if ours else 0.0, common / theirs if theirs else 0.0
    return 2 * precision * recall / (precision + recall + _TINY)


def _counts(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))
