"""Sequence-level distillation: the teacher answers the rows' prompts, and the student is fine-tuned on its answers.

Kim and Rush 2016, "Sequence-Level Knowledge Distillation", section 3.2, with greedy or sampled answers instead of beam
search. The teacher passes only text to the student, so their vocabularies may differ.

Each answer is generated once and stored immediately: in ``.NAME.teacher.jsonl`` next to the run folder until the folder
is opened, then in its ``teacher.jsonl``. A line is ``{"key", "prompt", "answer", "finished"}``; the key is a digest of
the teacher, the settings and the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_fed.config.algorithms.supervised import SequenceDistillationSettings
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import drop_torn_line
from gym_fed.core.text import counted
from gym_fed.data.encoding import prompt_ids, require_chat_template, text_ids
from gym_fed.data.row_counts import EncodedRows, RowCounts, counts_of
from gym_fed.data.rows import Row
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.algorithms.sft import Sft as _Sft
from gym_fed.training.processes.ranks import is_main
from gym_fed.training.run.job import Job

_PROGRESS_LINES = 10


class SequenceDistillation(Algorithm):
    """``sft`` on the teacher's answers, which are stored in ``teacher.jsonl`` in the run folder."""

    tried = "full; greedy and sampled"
    untried = "adapters"

    row_kind = "prompt"
    keeps_encoded = False

    def check(self, config: TrainingConfig) -> None:
        from gym_fed.base.models import resolve

        resolve(self.settings(config).teacher)

    def lengths(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[int]:
        """Return the number of tokens of each prompt together with the longest answer that the teacher may generate."""
        longest = self.settings(config).max_completion_length
        return [len(prompt_ids(tokenizer, row["prompt"])) + longest for row in rows]

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        answers = TeacherAnswers(config).of(rows)
        answered = [
            _with_answer(row, a["answer"]) for row, a in zip(rows, answers, strict=True) if a["finished"]
        ]
        if unfinished := len(rows) - len(answered):
            limit = self.settings(config).max_completion_length
            key = f"sequence_distillation.max_completion_length: {counted(limit, 'token')}"
            if not answered:
                reason = f"{key}: the teacher finished none of its {counted(unfinished, 'answer')}"
                remedy = "raise it, or choose a teacher that ends its answers"
                raise GymError(ErrorCode.DATA_INVALID, reason, remedy)
            console.err.print(
                f"{key}: skipped {unfinished} of {counted(len(rows), 'answer')}, which were truncated"
            )
        encoded = _Sft().encode(config, tokenizer, answered)
        dropped = RowCounts(rows=unfinished, dropped=unfinished)
        return EncodedRows(encoded, counts_of(encoded, len(answered)) + dropped)

    def build(self, job: Job) -> Any:
        TeacherAnswers(job.config).move_into_folder()
        return _Sft().build(job)


def _with_answer(row: Row, answer: str) -> Row:
    """Return the row with the teacher's answer instead of its own."""
    others = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    if isinstance(row["prompt"], str):
        return {**others, "text": row["prompt"] + answer}
    return {**others, "messages": [*row["prompt"], {"role": "assistant", "content": answer}]}


class TeacherAnswers:
    """The teacher's answers for one run, generated or read from its files."""

    def __init__(self, config: TrainingConfig) -> None:
        assert config.sequence_distillation is not None  # set by the config
        self._config = config
        self._settings: SequenceDistillationSettings = config.sequence_distillation
        self._dtype = self._settings.teacher_dtype or config.dtype
        self._file = config.output_dir / "teacher.jsonl"
        self._part = config.output_dir.parent / f".{config.output_dir.name}.teacher.jsonl"

    def of(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return ``{"answer", "finished"}`` for each row's ``prompt``, generating the answers that are not stored.

        Every answer depends only on settings, seed and rows, and not on which answers are already stored.
        """
        keys = [self._key(row) for row in rows]
        distinct = dict(zip(keys, rows, strict=True))
        known = {line["key"]: line for file in (self._file, self._part) for line in _read(file)}
        # Sorted by length, to reduce padding. Batches do not depend on the stored answers, so that a resumed run
        # samples the same answers.
        order = sorted(distinct, key=lambda key: (len(json.dumps(distinct[key]["prompt"])), key))
        size = self._settings.teacher_batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        missing = [batch for batch in batches if any(key not in known for key in batch)]
        if missing:
            self._generate(missing, distinct, known)
        return [known[key] for key in keys]

    def move_into_folder(self) -> None:
        """Move the generated answers to the run folder after it was opened."""
        if is_main() and self._part.exists():
            lines = {line["key"]: line for file in (self._file, self._part) for line in _read(file)}
            _append(self._file.with_suffix(".part"), lines.values(), "w")
            self._file.with_suffix(".part").replace(self._file)
            self._part.unlink()

    def _key(self, row: Row) -> str:
        settings = self._settings
        seed = self._config.seed if settings.temperature else None
        facts = [settings.teacher, self._dtype, settings.max_completion_length, settings.temperature, seed]
        content = json.dumps([*facts, row["prompt"], row.get("tools")], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _generate(
        self, batches: list[list[str]], rows: dict[str, Row], known: dict[str, dict[str, Any]]
    ) -> None:
        import torch

        from gym_fed.base.models import load_model, pick_device

        device = str(pick_device(self._config.device))
        loaded = load_model(self._settings.teacher, dtype=self._dtype, device=device)
        total, done = sum(map(len, batches)), 0
        interval = max(1, total // _PROGRESS_LINES)
        if is_main():
            self._part.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self._part)
        for batch in batches:
            with torch.inference_mode():
                lines = self._answer(loaded.model, loaded.tokenizer, batch, [rows[key] for key in batch])
            if is_main():
                _append(self._part, [line for line in lines if line["key"] not in known], "a")
            known.update((line["key"], line) for line in lines)
            before, done = done, done + len(batch)
            if before // interval != done // interval or done == total:
                console.err.print(f"teacher: {done} of {counted(total, 'answer')}")

    def _answer(self, model: Any, tokenizer: Any, keys: list[str], rows: list[Row]) -> list[dict[str, Any]]:
        import torch

        settings = self._settings
        prompts = [_prompt_ids(tokenizer, row) for row in rows]
        width, device = max(map(len, prompts)), model.device
        pad = tokenizer.pad_token_id or 0
        ends = _end_tokens(model, tokenizer)
        sampling: dict[str, Any] = {"do_sample": False}
        if settings.temperature:
            sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        masks = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        state = torch.get_rng_state()
        torch.manual_seed(int.from_bytes(hashlib.sha256("".join(keys).encode()).digest()[:8], "little") >> 1)
        try:
            out = model.generate(
                input_ids=torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device),
                attention_mask=torch.tensor(masks, device=device),
                max_new_tokens=settings.max_completion_length,
                pad_token_id=pad,
                eos_token_id=sorted(ends) or None,
                **sampling,
            )[:, width:].tolist()
        finally:
            torch.set_rng_state(state)
        texts = tokenizer.batch_decode(out, skip_special_tokens=True)
        return [
            {"key": key, "prompt": row["prompt"], "answer": text, "finished": bool(ends & set(ids))}
            for key, row, text, ids in zip(keys, rows, texts, out, strict=True)
        ]


def _prompt_ids(tokenizer: Any, row: Row) -> list[int]:
    if isinstance(row["prompt"], str):
        return text_ids(tokenizer, [row["prompt"]])[0]
    require_chat_template(tokenizer)
    encoded = tokenizer.apply_chat_template(
        row["prompt"], tools=row.get("tools"), tokenize=True, return_dict=True, add_generation_prompt=True
    )
    ids: list[int] = encoded["input_ids"]
    return ids


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    named = model.generation_config.eos_token_id
    ends = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return {end for end in ends if end is not None}


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file; the last line may be truncated if the process was killed."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def _append(file: Path, lines: Any, mode: str) -> None:
    with file.open(mode, encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
