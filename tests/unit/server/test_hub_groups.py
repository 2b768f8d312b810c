"""`gym-server groups`: contributors whose updates disagree permanently, and a variant of the base for each group."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_server.cli.main import app
from gym_server.evaluations.grouping import find_groups, split
from gym_server.evaluations.groups import saved_sentence
from gym_server.federation import Federation
from typer.testing import CliRunner

from gym_fed.config.hub.privacy import PrivacyConfig
from gym_fed.config.hub.sections import GateConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.file import DeltaFile
from tests.support.judged_rounds import Judged

pytestmark = pytest.mark.usefixtures("updates_without_admission")


ALPHABETS = {"ada": "ab", "ben": "ab", "cleo": "xyz", "dan": "xyz"}
"""Letters that each contributor answers with."""


def answered(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def rows_of(letters: str, seed: int, count: int = 6) -> list[dict[str, Any]]:
    """One question, answered with different words of the same letters."""
    draw = random.Random(seed)
    return [answered("name", "".join(draw.choices(letters, k=12))) for _ in range(count)]


def taught(letters: str, seed: int) -> list[dict[str, Any]]:
    """The rows of a contributor: those of its group, and a subject of its own."""
    draw = random.Random(seed)
    own = "".join(draw.choices(string.ascii_lowercase, k=6))
    return [
        *rows_of(letters, seed),
        *(answered(own * 2, "".join(draw.choices(own, k=20))) for _ in range(10)),
    ]


def hub_of(folder: Path, base: Path, alphabets: dict[str, str], rounds: int = 3) -> Judged:
    """A hub after some rounds in which each contributor taught its own answers to one question."""
    rows = folder.parent / "heldout.jsonl"
    held = [row for letters in sorted(set(alphabets.values())) for row in rows_of(letters, 99, 6)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in held))
    judged = Judged(folder, base, gate={"heldout": str(rows), "max_loss_increase": 10.0})
    for number in range(rounds):
        judged.model.follow(judged.fed.round_store.soups())
        judged.round(
            {
                who: judged.trained(
                    "", seed=10 * number + order, steps=6, learning_rate=3e-3, rows=taught(letters, order)
                )
                for order, (who, letters) in enumerate(alphabets.items())
            }
        )
    return judged


def test_two_halves_with_different_answers_are_two_groups_that_gain(tmp_path: Path, tiny_base: Path) -> None:
    judged = hub_of(tmp_path / "hub", tiny_base, ALPHABETS)
    fed = judged.fed
    found = find_groups(fed.state, fed.config, tmp_path / "variants")
    assert [group.contributors for group in found.groups] == [["ada", "ben"], ["cleo", "dan"]]
    assert found.within > found.between
    assert all(group.is_offered and group.num_rows == 6 for group in found.groups)
    assert found.sentence.startswith(
        "two groups at version 3, of 2 contributors and 2 contributors: each gains "
    )
    judged.model.follow([])
    for number in (1, 2):
        with DeltaFile.open(tmp_path / "variants" / f"group-{number}.gymdelta", judged.model.spec) as delta:
            assert delta.norm() > 0
    assert fed.round_store.head().height == 3, "the common version stays"
    with pytest.raises(GymError) as error:
        find_groups(fed.state, fed.config, tmp_path / "variants")
    assert error.value.code is ErrorCode.FILE_EXISTS
    judged.close()
    done = CliRunner().invoke(app, ["groups", "--dir", str(tmp_path / "hub")])
    assert done.exit_code == 0, done.exception
    assert "two groups at version 3" in done.output
    with Federation.open(tmp_path / "hub", read_only=True) as again, again.database.reading() as tx:
        assert saved_sentence(tx) == found.sentence


def test_contributors_with_the_same_answer_are_one_group(tmp_path: Path, tiny_base: Path) -> None:
    judged = hub_of(tmp_path / "hub", tiny_base, dict.fromkeys([*ALPHABETS, "eve", "fay"], "ab"))
    found = find_groups(judged.fed.state, judged.fed.config)
    assert not any(group.is_offered for group in found.groups)
    assert found.sentence.startswith("no split at version 3")
    judged.close()


def test_items_are_split_by_similarity_whatever_their_order() -> None:
    sides = np.asarray([True, False, True, True, False])
    similarity = np.where(sides[:, None] == sides, 0.3, 0.1)
    np.fill_diagonal(similarity, 1.0)
    assert split(similarity).tolist() == sides.tolist()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"gate": GateConfig()}, ErrorCode.CONFIG_INVALID, "held-out data"),
        ({"privacy": PrivacyConfig(epsilon=8.0)}, ErrorCode.CONFIG_INVALID, "privacy"),
        ({}, ErrorCode.NOT_FOUND, "at least 2 rounds"),
    ],
)
def test_groups_are_refused_by_name(
    tmp_path: Path, tiny_base: Path, changes: dict[str, object], code: ErrorCode, words: str
) -> None:
    judged = hub_of(tmp_path / "hub", tiny_base, ALPHABETS, rounds=0)
    with pytest.raises(GymError, match=words) as error:
        find_groups(judged.fed.state, judged.fed.config.model_copy(update=changes))
    assert error.value.code is code
    judged.close()
