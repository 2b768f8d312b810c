"""Private rounds at the contributor: terms, limits, the book of what was spent, and what leaves the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from gym_client.agent import global_model
from gym_client.agent.policy import Policy
from gym_client.cli.main import app as command
from gym_client.identity.home import Home
from gym_client.privacy import private_task
from gym_client.privacy.book import Charge, PrivacyBook
from gym_client.privacy.terms import (
    Promises,
    check_promises,
    make_terms,
    planned,
    require_as_announced,
    require_as_promised,
)
from typer.testing import CliRunner

from gym_fed.config.hub.privacy import LocalPrivacy, PrivacyConfig
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from tests.support.agent_scene import Scene, empty
from tests.unit.client.test_client_app import RECIPE, SERVER, Rounds, fresh_process, manifest_of

__all__ = ["fresh_process"]

PRIVATE = {**RECIPE, "privacy": {"noise_multiplier": 1.0}}
COST = NoiseEvent(noise_multiplier=1.0, sampling_probability=0.25, count=4)
CHARGE = Charge("d1", "s1", 1, "a" * 64, 1.0, 0.25, 4, 1e-5, 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


@pytest.fixture
def rounds(home: Home, tmp_path: Path, tiny_base: Path) -> Rounds:
    data = tmp_path / "data.jsonl"
    rows = [{"instruction": f"double: {c}", "output": c * 2} for c in "abcdefgh"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Rounds(home, data, tiny_base)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path)) as scene:
        yield scene


def refusal(action: Any) -> str:
    with pytest.raises(GymError) as caught:
        action()
    assert caught.value.code is ErrorCode.POLICY_REFUSED
    return str(caught.value)


def test_nothing_but_the_private_weights_leaves_and_the_book_has_it_before(rounds: Rounds) -> None:
    reply = rounds.call(rounds.task(recipe=PRIVATE), **{"by-reference": True})
    manifest = manifest_of(reply)
    assert manifest.num_examples == reply["metrics"]["num-examples"] == 1
    assert set(manifest.metrics) == {"update_norm", "num_steps"}
    (charge,) = PrivacyBook(rounds.home).charges()
    assert (charge.delta, charge.server, charge.server_round) == (manifest.delta_sha256, SERVER, 1)
    assert charge.event() == COST
    rounds.call(rounds.task(recipe=PRIVATE), **{"by-reference": True})  # sent again, paid once
    assert len(PrivacyBook(rounds.home).charges()) == 1


def test_a_crash_between_charge_and_signature_pays_once_and_is_let_finish(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str) -> None:
        raise Killed

    monkeypatch.setattr(private_task, "failpoint", kill)
    with pytest.raises(Killed):
        rounds.call(rounds.task(recipe=PRIVATE))
    monkeypatch.setattr(private_task, "failpoint", lambda name: None)
    monkeypatch.setattr(global_model, "_loaded", {})
    (before,) = PrivacyBook(rounds.home).charges()
    rounds.home.policy_path.write_text(f"max_epsilon: {epsilon([COST], 1e-5) * 1.01}\n")
    manifest = manifest_of(rounds.call(rounds.task(recipe=PRIVATE)))
    assert PrivacyBook(rounds.home).charges() == [before]
    assert manifest.delta_sha256 == before.delta
    shown = rounds.refused(ErrorCode.POLICY_REFUSED, rounds.task(recipe=PRIVATE, server_round=2))
    assert "over this machine's max_epsilon" in shown
    assert not list(rounds.home.tasks.glob("*/run"))  # refused before training


def test_the_book_survives_a_torn_line_and_refuses_a_spoilt_one(home: Home) -> None:
    book = PrivacyBook(home)
    book.charge(CHARGE)
    book.charge(CHARGE)
    with book.path.open("ab") as file:
        file.write(b'{"data": "d1", "ser')  # a crash: nothing was signed on it
    assert book.charges() == [CHARGE]
    other = replace(CHARGE, server="s2", delta="b" * 64, steps=8)
    book.charge(other)
    assert book.charges() == [CHARGE, other]
    (row,) = book.summary()
    together = epsilon([replace_count(12)], 1e-5)
    assert row["epsilon"] == together  # the same examples pay at both hubs
    assert set(row["hubs"]) == {"s1", "s2"}
    shown = CliRunner().invoke(command, ["privacy", "--home", str(home.folder), "--json"])
    assert json.loads(shown.stdout) == [row]
    assert "all together" in CliRunner().invoke(command, ["privacy", "--home", str(home.folder)]).stdout
    book.path.write_text("not JSON\n" + book.path.read_text())
    with pytest.raises(GymError, match="line 1") as caught:
        book.charges()
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def replace_count(count: int) -> NoiseEvent:
    return NoiseEvent(noise_multiplier=1.0, sampling_probability=0.25, count=count)


CENTRAL = {"aggregator": "mean", "epsilon": 4.0, "target_delta": 1e-5}


def test_the_terms_show_a_round_and_all_rounds_before_joining(home: Home) -> None:
    book = PrivacyBook(home)
    book.charge(CHARGE)
    recipe = TrainingRecipe(**PRIVATE)
    plan = planned(recipe, 8)
    promises = Promises.parse(
        json.dumps({"central": CENTRAL | {"epsilon": 6}, "secure_aggregation": {"threshold": 3}})
    )
    terms = make_terms(recipe, promises, plan, book, "d1", 2)
    assert terms.epsilon_per_round == terms.epsilon_spent == epsilon([COST], 1e-5)
    assert terms.epsilon_after_all == epsilon([replace_count(8)], 1e-5)
    assert terms.epsilon_with_spent == epsilon([replace_count(12)], 1e-5)
    shown = terms.in_words()
    assert "all you send: epsilon 6 (delta 1e-05), promised; the hub sees sums of 3 or more" in shown
    assert terms.details() == 'the hub adds noise to the result of "mean"'
    open_terms = make_terms(TrainingRecipe(), Promises(), None, book, "d2", 2).in_words()
    assert "epsilon is infinite" in open_terms
    assert "no noise anywhere" in open_terms


def test_limits_of_the_policy_are_held_against_recipes_tasks_and_promises(rounds: Rounds) -> None:
    strict = Policy(max_epsilon=3.0)
    strict.check_recipe(TrainingRecipe(**PRIVATE), "d")
    assert "no recipe.privacy" in refusal(lambda: strict.check_recipe(TrainingRecipe(), "d"))
    promised = Promises({"epsilon": 4.0, "target_delta": 1e-5})
    check_promises(Policy(max_hub_epsilon=4.0), promised)
    assert "epsilon 4" in refusal(lambda: check_promises(Policy(max_hub_epsilon=3.9), promised))
    assert "no central privacy" in refusal(lambda: check_promises(Policy(max_hub_epsilon=100.0), Promises()))
    assert "individually" in refusal(
        lambda: check_promises(Policy(require_secure_aggregation=True), promised)
    )
    rounds.home.policy_path.write_text("require_secure_aggregation: true\n")
    assert "secure_aggregation" in rounds.refused(ErrorCode.POLICY_REFUSED, rounds.task())
    nameless = '{"aggregator": 1, "epsilon": 1.0, "target_delta": 1e-5}'
    for shown in (
        '{"mechanism": "none"}',
        '{"epsilon": NaN, "target_delta": 1e-5}',
        '{"epsilon": 1.0}',
        nameless,
    ):
        assert "privacy promise" in refusal(lambda shown=shown: Promises.parse(f'{{"central": {shown}}}'))
    worthless = Promises({"epsilon": 0.1, "target_delta": 0.5})
    assert "any epsilon is small" in refusal(lambda: check_promises(Policy(), worthless))
    loose = TrainingRecipe(**{**PRIVATE, "privacy": {"noise_multiplier": 1.0, "target_delta": 0.01}})
    assert "max_target_delta" in refusal(lambda: Policy().check_recipe(loose, "d"))
    with pytest.raises(ValueError, match="less than or equal"):
        LocalPrivacy(target_delta=0.5)
    with pytest.raises(ValueError, match="less than or equal"):
        PrivacyConfig(epsilon=1.0, target_delta=0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"privacy": None}, "no recipe.privacy"),
        ({"privacy": {"noise_multiplier": 0.9}}, "noise_multiplier"),
        ({"privacy": {"noise_multiplier": 1.0, "target_delta": 1e-4}}, "target_delta"),
        ({"max_steps": 5}, "max_steps"),
        ({"gradient_accumulation_steps": 2}, "batch"),
        ({"max_length": 9}, "decides which rows are used"),
        ({"algorithm": "pretrain"}, "decides which rows are used"),
    ],
)
def test_a_task_weaker_than_announced_is_refused(change: dict[str, Any], named: str) -> None:
    announced = TrainingRecipe(**PRIVATE)
    require_as_announced(announced, announced)
    asked = TrainingRecipe(**{**PRIVATE, **change})
    assert named in refusal(lambda: require_as_announced(announced, asked))
    require_as_announced(TrainingRecipe(), asked)


SUMS = {"threshold": 3}


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"central": CENTRAL | {"epsilon": 5.0}}, "epsilon 5"),
        ({"central": CENTRAL | {"target_delta": 1e-4}}, "target_delta 0.0001"),
        ({}, "epsilon inf"),
        ({"central": CENTRAL, "secure_aggregation": None}, "individually"),
        (
            {"central": CENTRAL, "secure_aggregation": SUMS},
            "the update itself",
        ),
    ],
    ids=["epsilon", "delta", "none", "secure", "task-in-the-clear"],
)
def test_a_hub_that_promises_less_than_was_shown_gets_no_further_round(
    scene: Scene, rounds: Rounds, now: dict[str, Any], named: str
) -> None:
    secure = SUMS if named in ("individually", "the update itself") else None
    shown = {"central": CENTRAL, "secure_aggregation": secure}
    promised = Promises.parse(json.dumps(shown))
    scene.hub.privacy_json = json.dumps(now)
    content = RecordDict({"task": ConfigRecord({"spec": json.dumps(rounds.task(server=scene.hub.server))})})
    scene.hub.give(scene.task("m1", content))
    scene.hub.finish()
    scene.agent(empty, promises=promised).run()
    assert named in scene.error_of("m1").reason
    with pytest.raises(GymError, match="epsilon 4"):
        require_as_promised(Policy(max_hub_epsilon=3.0), promised, promised)
    require_as_promised(Policy(), promised, promised)


def test_what_the_hub_spent_on_the_contributor_is_shown_once_it_changes(scene: Scene) -> None:
    spent = {"epsilon": 1.948, "target_delta": 1e-5, "rounds": 6}
    scene.hub.rewards_json = json.dumps({"privacy": spent})
    scene.hub.give(scene.task("m1"))
    scene.hub.finish()
    scene.agent(empty).run()
    (shown,) = scene.display.texts("hub-privacy")
    assert shown == "privacy on the hub: epsilon 1.95 is spent on your updates of 6 rounds (delta 1e-05)"


def test_the_hub_does_not_get_the_reason_why_a_private_task_failed(scene: Scene, rounds: Rounds) -> None:
    task = rounds.task(server=scene.hub.server, recipe=PRIVATE)

    def fail(message: Any, context: Any) -> RecordDict:
        raise GymError(ErrorCode.INTERNAL, "row 17 holds a secret")  # any other code would look the same

    content = RecordDict({"task": ConfigRecord({"spec": json.dumps(task)})})
    scene.hub.give(scene.task("m1", content))
    scene.hub.give(scene.task("m2"))
    scene.hub.finish()
    calls = iter([fail, empty])
    scene.agent(lambda message, context: next(calls)(message, context)).run()
    assert "secret" not in scene.error_of("m1").reason
    assert scene.error_of("m1").reason.startswith("policy-refused: the reason stays with the contributor")
    assert any("secret" in text for text in scene.display.texts("failed"))
