"""What a model sees of a row: its tokens as text, and which of them it learns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gym_fed.data.encoding import IGNORED, Encoded, encode_one, require_chat_template
from gym_fed.data.row_counts import RowCounts
from gym_fed.data.rows import PlacedDict, kind_of
from gym_fed.data.steps import Row


@dataclass(frozen=True)
class Segment:
    """A run of tokens that are all learnt, or all only read."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Sequence:
    """One sequence that the model is given.

    Attributes:
        name: ``row``, or ``chosen``, ``rejected``, ``liked``, ``disliked``, ``prompt``.
        encoded: Tokens and labels before they are cut.
        cut: Tokens that ``max_length`` cuts off.
    """

    name: str
    encoded: Encoded
    cut: int

    def segments(self, tokenizer: Any) -> list[Segment]:
        """The sequence as it is seen, in order."""
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
    """Of all sequences that were looked at."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    tokens_learnt: int = 0
    tokens_seen: int = 0
    sequences_cut: int = 0
    nothing_to_learn: int = 0
    counts: RowCounts = field(default_factory=RowCounts)
    """Of rows, as ``encode_rows`` counts them; a pair counts as one."""

    def add(self, sequences: Iterable[Sequence]) -> None:
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

    def _count(self, sequences: list[Sequence]) -> None:
        if any(sequence.name == "prompt" for sequence in sequences):
            self.counts += RowCounts.whole(1)  # it is answered, not learned
            return
        learned = lost = 0
        for sequence in sequences:
            labels = [label != IGNORED for label in sequence.encoded["labels"]]
            kept = labels[: len(labels) - sequence.cut]
            learned += sum(kept[1:])
            lost += sum(labels[1:]) - sum(kept[1:])
        longest = max((len(sequence.encoded["input_ids"]) for sequence in sequences), default=0)
        cut = any(sequence.cut for sequence in sequences)
        self.counts.count(longest, cut=cut, tokens=learned, tokens_cut=lost)

    def summary(self) -> dict[str, Any]:
        """Figures for people and JSON; lengths are in tokens, before cutting."""
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
    tokenizer: Any, row: Row, *, max_length: int | None = None, assistant_only: bool = True
) -> list[Sequence]:
    """Every sequence that a row becomes: one, or two for a pair.

    Raises:
        GymError: ``DATA_INVALID`` when the tokenizer cannot encode it; see ``encode_rows``.
    """
    found = []
    for name, encoded in _encoded(tokenizer, row, assistant_only):
        length = len(encoded["input_ids"])
        found.append(Sequence(name, encoded, 0 if max_length is None else max(0, length - max_length)))
    return found


def _encoded(tokenizer: Any, row: Row, assistant_only: bool) -> Iterator[tuple[str, Encoded]]:
    kind = kind_of(row)
    if kind == "preference":
        for name in ("chosen", "rejected"):
            yield name, _answered(tokenizer, row, row[name])
    elif kind == "unpaired":
        yield "liked" if row["label"] else "disliked", _answered(tokenizer, row, row["completion"])
    elif kind == "prompt":
        ids = _prompt(tokenizer, row)
        yield "prompt", {"input_ids": ids, "labels": [IGNORED] * len(ids)}
    else:
        yield "row", encode_one(tokenizer, row, assistant_only=assistant_only)


def _answered(tokenizer: Any, row: Row, answer: Any) -> Encoded:
    """Of a prompt and an answer, only the answer counts, whoever spoke before."""
    if isinstance(row["prompt"], str):
        return encode_one(tokenizer, {"prompt": row["prompt"], "completion": answer})
    joined = {**_context(row), "messages": [*row["prompt"], *answer]}
    whole = encode_one(tokenizer, PlacedDict.of(joined, getattr(row, "place", None)))
    start = len(_prompt(tokenizer, row))
    return {"input_ids": whole["input_ids"], "labels": [IGNORED] * start + whole["labels"][start:]}


def _prompt(tokenizer: Any, row: Row) -> list[int]:
    if isinstance(row["prompt"], str):
        return list(tokenizer(row["prompt"])["input_ids"])
    require_chat_template(tokenizer)
    arguments = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    out = tokenizer.apply_chat_template(row["prompt"], tools=row.get("tools"), **arguments)
    return list(out["input_ids"])


def _context(row: Row) -> Row:
    return {"tools": row["tools"]} if "tools" in row else {}
