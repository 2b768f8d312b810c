"""Inputs of the harness: task sources, prompt options, requests, and the user's rows or generated rows as a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Continuation, Loglikelihood


@dataclass(frozen=True)
class PromptOptions:
    """Options for building prompts.

    Attributes:
        num_fewshot: Examples in each prompt; None for each task's own. A task defined with 0 keeps 0.
        limit: Maximum number of rows of each task, from its first one.
        apply_chat_template: True to render prompts as conversations in the model's template, with examples as turns.
            None: only for tasks that request it, if the model has a template.
        rows: Function of a task's name and number of rows that returns the row numbers to use; None for all. A row's
            prompt does not depend on the selection.
    """

    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool | None = False
    rows: Callable[[str, int], Collection[int]] | None = None


RequestKey = tuple[str, int, int, int]
"""Indices of the task, the row, the request in the row, and the repetition."""


@dataclass(frozen=True)
class PreparedRequest:
    """A tokenized request of a row.

    Attributes:
        continuations: Continuations to score; their scores are summed. Only a text longer than the context has several.
        answer: A prompt to answer, instead of ``continuations``.
    """

    key: RequestKey
    continuations: tuple[Continuation, ...] = ()
    answer: AnswerRequest | None = None


Outcome = Loglikelihood | AnswerResult


LOCAL_FORMATS = ("json", "csv", "text", "parquet")
"""Values of ``dataset_path`` that read local files."""
RENDERED = "rendered"
"""Value of the metadata's ``conversation`` for rows that are already in the chat template."""


class TaskSource(Protocol):
    """The interface of a task.

    Attributes:
        config: The contents of a task's YAML as lm-evaluation-harness reads it; ``custom_dataset``, or ``dataset_path``
            and ``dataset_kwargs``, provide local rows.
        lock: Digest of the task's definition and data.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def lock(self) -> str: ...


def applies_template(source: TaskSource, asked: bool | None) -> bool:
    """Return True if a task's prompts are rendered with the model's chat template.

    Args:
        asked: The caller's choice; None to use ``conversation`` in the task's metadata (an extension by gym-fed).
            lm-evaluation-harness applies no template by default.
    """
    stated = (source.config.get("metadata") or {}).get("conversation")
    return stated != RENDERED and (stated is True if asked is None else asked)


def is_rendered(source: TaskSource) -> bool:
    """Return True if a task's rows are already in the model's chat template."""
    return (source.config.get("metadata") or {}).get("conversation") == RENDERED


def require_local(source: TaskSource) -> None:
    """Refuse definitions that would make the harness access the network.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    from lm_eval.api.registry import METRIC_REGISTRY

    def refused(problem: str) -> GymError:
        return GymError(
            ErrorCode.CONFIG_INVALID,
            f"task {source.name}: {problem}",
            "evaluations run without a network: use local files and lm-eval's own metrics",
        )

    config = source.config
    path = config.get("dataset_path")
    if not callable(config.get("custom_dataset")) and path not in LOCAL_FORMATS:
        raise refused(f"dataset_path: {path!r} is not one of {', '.join(LOCAL_FORMATS)}")
    files = json.dumps((config.get("dataset_kwargs") or {}).get("data_files", ""), default=str)
    if "://" in files:
        raise refused("dataset_kwargs: data_files contains a URL")
    if config.get("use_prompt"):
        raise refused("use_prompt is not supported")
    for entry in config.get("metric_list") or ():
        metric = entry.get("metric")
        known = callable(metric) or config.get("process_results") is not None
        if entry.get("hf_evaluate") or not (known or metric in METRIC_REGISTRY):
            raise refused(f"metric_list: {metric!r} is not one of lm-eval's own metrics")


def row_sha256(row: Any) -> str:
    """Return the digest of a row, independent of the order of its columns."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_MAX_TOKENS = 64


def is_own(name: str) -> bool:
    """Return True if a benchmark is a generated task or a file of conversations rather than a suite's task."""
    return name in TASKS or (Path(name).is_file() and Path(name).suffix not in (".yaml", ".yml"))


@dataclass(frozen=True)
class OwnRows:
    """Generated rows or a file of conversations, as a task of the harness.

    Attributes:
        name: The name of the generated task, or the file's.
        rows: Rows with ``prompt``, already in the chat template, and ``answer``.
    """

    name: str
    rows: Sequence[Mapping[str, str]]
    version: str = "1"

    @property
    def config(self) -> dict[str, Any]:
        """See ``TaskSource``."""
        return {
            "custom_dataset": self._dataset,
            "test_split": "test",
            "output_type": "generate_until",
            "num_fewshot": 0,
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n\n\n"], "max_gen_toks": _MAX_TOKENS},
            "filter_list": [
                {
                    "name": "stripped",
                    "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
                }
            ],
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"conversation": RENDERED},
        }

    @property
    def lock(self) -> str:
        """See ``TaskSource``."""
        return row_sha256({"task": self.name, "version": self.version, "rows": list(self.rows)})

    def _dataset(self, **_: Any) -> Any:
        from datasets import Dataset

        return {"test": Dataset.from_list([dict(row) for row in self.rows])}


def require_answers(name: str, limit: int | None) -> None:
    """Refuse rows without an answer before a model is loaded. Raises the errors of ``own_rows`` about rows."""
    if name not in TASKS:
        for _ in _conversations(name, limit):
            pass


def _conversations(name: str, limit: int | None) -> Iterator[tuple[list[Mapping[str, Any]], str]]:
    """Yield the prompt and the answer of each row."""
    from gym_fed.data.generated import generate
    from gym_fed.data.reading import load_rows

    try:
        pairs = (
            generate(name, limit or 100, split="heldout") if name in TASKS else list(load_rows(name))[:limit]
        )
    except GymError as error:
        if "--columns" not in error.hint:
            raise
        raise GymError(
            error.code,
            error.message,
            "rows need messages, or prompt and completion; for other columns, replace --tasks with --data FILE "
            "--columns prompt=question,completion=answer, or write a task file",
        ) from error
    for number, row in enumerate(pairs, start=1):
        messages = row.get("messages") or [
            {"role": "user", "content": row.get("prompt", "")},
            {"role": "assistant", "content": row.get("completion", "")},
        ]
        if len(messages) < 2 or messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{name}: row {number} does not end with an answer",
                "use messages that end with an assistant message, or prompt and completion",
            )
        yield messages[:-1], str(messages[-1]["content"]).strip()


def own_rows(name: str, tokenizer: Any, limit: int | None) -> OwnRows:
    """Create the task of a benchmark for which ``is_own`` is True, with prompts in the chat template.

    Raises:
        GymError: ``DATA_INVALID`` for rows without an answer; errors of ``load_rows``; ``CONFIG_INVALID`` for a
            tokenizer without a chat template.
    """
    from gym_fed.data.encoding import require_chat_template

    specs = []
    for asked, answer in _conversations(name, limit):
        require_chat_template(tokenizer)
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        specs.append({"prompt": str(prompt), "answer": answer})
    return OwnRows(Path(name).name, specs)
