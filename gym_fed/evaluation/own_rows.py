"""Custom rows as a task with exact match: held-out rows of a generated task, or a file of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TASKS
from gym_fed.evaluation.harness.sources import RENDERED, row_sha256

_MAX_TOKENS = 64


def is_own(name: str) -> bool:
    """Return True if a benchmark is a generated task or a file of conversations rather than a suite's task."""
    return name in TASKS or (Path(name).is_file() and Path(name).suffix not in (".yaml", ".yml"))


@dataclass(frozen=True)
class OwnRows:
    """A task for ``harness.Preparation``.

    Attributes:
        name: The name of the generated task, or the file's.
        rows: ``prompt`` as the model gets it, and ``answer``.
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
    """Refuse rows without an answer before a model is loaded; raises as ``own_rows``, except for the tokenizer."""
    if name not in TASKS:
        for _ in _conversations(name, limit):
            pass


def _conversations(name: str, limit: int | None) -> Iterator[tuple[list[Mapping[str, Any]], str]]:
    """Yield prompt and answer of each row."""
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
            "rows need messages, or prompt and completion; other columns are named with --data FILE --columns "
            "prompt=question,completion=answer in place of --tasks, or by a task file",
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
                "give messages that end with the assistant's, or prompt and completion",
            )
        yield messages[:-1], str(messages[-1]["content"]).strip()


def own_rows(name: str, tokenizer: Any, limit: int | None) -> OwnRows:
    """Create the task of a benchmark for which ``is_own`` is True, with prompts in the chat template.

    Raises:
        GymError: ``DATA_INVALID`` for rows without an answer; as ``load_rows``; ``CONFIG_INVALID`` for a tokenizer
            without a chat template.
    """
    from gym_fed.data.encoding import require_chat_template

    made = []
    for asked, answer in _conversations(name, limit):
        require_chat_template(tokenizer)
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        made.append({"prompt": str(prompt), "answer": answer})
    return OwnRows(Path(name).name, made)
