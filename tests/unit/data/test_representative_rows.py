"""The rows that a coordinator judges by when its file is longer than ``max_examples``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.rounds.hub_model import coordinator_rows

from gym_fed.core.errors import GymError
from gym_fed.data.rows import representative


def labelled(label: str, number: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"{label}?"}, {"role": "assistant", "content": label}]
    return {"messages": turns, "number": number}


def labels(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["messages"][-1]["content"] for row in rows)


@pytest.mark.parametrize("shuffled", [False, True])
def test_each_label_keeps_its_share_of_a_classification_whatever_its_order(shuffled: bool) -> None:
    names = ["yes"] * 60 + ["no"] * 30 + ["unknown"] * 10
    if shuffled:
        names = [names[37 * k % 100] for k in range(100)]
    rows = [labelled(name, number) for number, name in enumerate(names)]
    assert labels(representative(rows, 20)) == {"yes": 12, "no": 6, "unknown": 2}


def test_rows_with_different_answers_are_taken_from_the_whole_file_in_its_order() -> None:
    rows: list[dict[str, Any]] = [{"text": f"text {k}"} for k in range(10)]
    assert representative(rows, 4) == [rows[1], rows[3], rows[6], rows[8]]
    assert representative(rows, 10) == rows
    assert representative(rows, 11) == rows


def test_a_hub_judges_by_every_topic_of_a_held_out_file_that_is_sorted_by_topic(tmp_path: Path) -> None:
    rows = [labelled(topic, number) for topic in ("law", "art", "war") for number in range(50)]
    (tmp_path / "heldout.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert labels(coordinator_rows("heldout.jsonl", "auto", 30, tmp_path, "heldout")) == dict.fromkeys(
        ("law", "art", "war"), 10
    )


def test_a_file_that_is_cut_between_the_two_readings_is_refused() -> None:
    class Cut:
        readings = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            self.readings += 1
            return iter([{"text": f"text {k}"} for k in range(10 if self.readings == 1 else 3)])

    with pytest.raises(GymError, match="changed while they were being read"):
        representative(Cut(), 4)
