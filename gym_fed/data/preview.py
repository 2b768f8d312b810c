"""Show a row as the model sees it: its tokens as text, with those to train on marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gym_fed.core.tokenizer_errors import tokenizer_errors
from gym_fed.data.chat_templates.conversation import Reasoning, write_answered
from gym_fed.data.encoding import IGNORED, Encoded, encode_one, require_chat_template, text_ids
from gym_fed.data.row_counts import RowCounts
from gym_fed.data.rows import as_kind, kind_of, place_of
from gym_fed.data.steps import Row
from gym_fed.data.string_rows import as_turns


@dataclass(frozen=True)
class Segment:
    """A run of tokens that are either all trained on or all ignored."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class PreviewedSequence:
    """An encoded sequence of a row.

    Attributes:
        name: ``row``, ``chosen``, ``rejected``, ``liked``, ``disliked`` or ``prompt``.
        encoded: Tokens and labels before truncation.
        cut: Number of tokens beyond ``max_length``.
    """

    name: str
    encoded: Encoded
    cut: int

    def segments(self, tokenizer: Any) -> list[Segment]:
        """Return the sequence as segments, in order."""
        length = len(self.encoded["input_ids"]) - self.cut
        pairs = zip(self.encoded["input_ids"][:length], self.encoded["labels"][:length], strict=True)
        runs: list[tuple[bool, list[int]]] = []
        for token, label in pairs:
            learnt = label != IGNORED
            if not runs or runs[-1][0] != learnt:
                runs.append((learnt, []))
            runs[-1][1].append(token)
        return [Segment(tokenizer.decode(ids), learnt) for learnt, ids in runs]


@dataclass
class Statistics:
    """Token statistics of the previewed sequences."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    tokens_learnt: int = 0
    tokens_seen: int = 0
    sequences_cut: int = 0
    nothing_to_learn: int = 0
    prompts: int = 0
    """Number of prompt rows, which a model will answer; prompts are not trained on."""

    counts: RowCounts = field(default_factory=RowCounts)
    """Row counts as in ``encode_rows``; a pair counts as one."""

    def add(self, sequences: Iterable[PreviewedSequence]) -> None:
        """Count one row."""
        self.rows += 1
        sequences = list(sequences)
        self._count(sequences)
        for sequence in sequences:
            length = len(sequence.encoded["input_ids"])
            labels = sequence.encoded["labels"][: length - sequence.cut]
            learnt = sum(label != IGNORED for label in labels[1:])
            self.lengths.append(length)
            self.tokens_seen += len(labels)
            self.tokens_learnt += learnt
            self.sequences_cut += sequence.cut > 0
            self.nothing_to_learn += sequence.name != "prompt" and learnt == 0

    def _count(self, sequences: list[PreviewedSequence]) -> None:
        if any(sequence.name == "prompt" for sequence in sequences):
            self.prompts += 1
            self.counts += RowCounts.whole(1)
            return
        learned = lost = 0
        for sequence in sequences:
            labels = [label != IGNORED for label in sequence.encoded["labels"]]
            learnable = labels[: len(labels) - sequence.cut]
            learned += sum(learnable[1:])
            lost += sum(labels[1:]) - sum(learnable[1:])
        longest = max((len(sequence.encoded["input_ids"]) for sequence in sequences), default=0)
        cut = any(sequence.cut for sequence in sequences)
        self.counts.count(longest, cut=cut, tokens=learned, tokens_cut=lost)

    def summary(self) -> dict[str, Any]:
        """Return the statistics for display and JSON; lengths are in tokens before truncation."""
        lengths = sorted(self.lengths)
        count = len(lengths)
        return {
            "rows": self.rows,
            "sequences": count,
            "tokens": sum(lengths),
            "tokens_mean": sum(lengths) / count if count else 0.0,
            "tokens_p95": lengths[min(count - 1, -(-95 * count // 100) - 1)] if count else 0,
            "tokens_max": lengths[-1] if count else 0,
            "share_learnt": self.tokens_learnt / self.tokens_seen if self.tokens_seen else 0.0,
            "sequences_cut": self.sequences_cut,
            "nothing_to_learn": self.nothing_to_learn,
        }


def sequences_of(
    tokenizer: Any,
    row: Row,
    *,
    max_length: int | None = None,
    assistant_only: bool = True,
    mask_history: bool = False,
    reasoning: Reasoning = "learn",
) -> list[PreviewedSequence]:
    """List the sequences of a row: one, or two for a preference pair.

    Raises:
        GymError: ``DATA_INVALID`` if the tokenizer cannot encode it; see ``encode_rows``.
    """
    previews = []
    if kind_of(row) == "stepwise":
        (row,) = as_kind([row], "unpaired")
    (row,) = as_turns(tokenizer, [row])
    kind = kind_of(row)
    if kind in ("preference", "unpaired", "prompt"):
        sequences = _prompt_sequences(tokenizer, row, str(kind), reasoning)
    else:
        encoded = encode_one(
            tokenizer, row, assistant_only=assistant_only, mask_history=mask_history, reasoning=reasoning
        )
        sequences = iter([("row", encoded)])
    for name, encoded in sequences:
        length = len(encoded["input_ids"])
        previews.append(
            PreviewedSequence(name, encoded, 0 if max_length is None else max(0, length - max_length))
        )
    return previews


def _prompt_sequences(
    tokenizer: Any, row: Row, kind: str, reasoning: Reasoning
) -> Iterator[tuple[str, Encoded]]:
    if kind == "preference":
        for name in ("chosen", "rejected"):
            yield name, _answered(tokenizer, row, row[name], reasoning)
    elif kind == "unpaired":
        yield "liked" if row["label"] else "disliked", _answered(tokenizer, row, row["completion"], reasoning)
    else:
        ids = _ids(tokenizer, row, [], reasoning)
        yield "prompt", {"input_ids": ids, "labels": [IGNORED] * len(ids)}


def _answered(tokenizer: Any, row: Row, answer: Any, reasoning: Reasoning) -> Encoded:
    """Encode a prompt with its answer; labels begin at the first token that differs from those of the prompt."""
    if isinstance(row["prompt"], str):
        return encode_one(tokenizer, {"prompt": row["prompt"], "completion": answer})
    ids, prompt = _ids(tokenizer, row, answer, reasoning), _ids(tokenizer, row, [], reasoning)
    start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
    return {"input_ids": ids, "labels": [IGNORED] * start + ids[start:]}


def _ids(tokenizer: Any, row: Row, answer: Any, reasoning: Reasoning) -> list[int]:
    with tokenizer_errors(tokenizer):
        if isinstance(row["prompt"], str):
            return text_ids(tokenizer, [row["prompt"]])[0]
        require_chat_template(tokenizer)
        text = write_answered(
            tokenizer, row["prompt"], answer, row.get("tools") or None, place_of(row, 1), reasoning=reasoning
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
