"""A hub that changes its terms gets a new consent first, which the home remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from gym_client.agent.agent import Agent
from gym_client.agent.agreement import Agreement, Renewal, Terms
from gym_client.cli import terminal
from gym_client.cli.terminal import TerminalConsent
from gym_client.identity.home import Home
from pydantic import ValidationError

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.credits import PayTerms, ReputationConfig, RewardsConfig
from gym_fed.config.hub.region import RegionConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.agent_scene import Recorder, Scene, empty

SERVER = "s" + "0" * 16
DIGEST = "sha256:" + "0" * 64


def terms(data: str = "rows", server: str = SERVER, codec: str = "bitdelta", **recipe: Any) -> Terms:
    return Terms.of(server, DIGEST, TrainingRecipe(**recipe), CodecPolicy(codec=codec), "", data)


def task(codec: str = "bitdelta", server: str = SERVER, **recipe: Any) -> TaskSpec:
    return TaskSpec(
        server=server,
        server_round=1,
        base_model="described",
        base_digest=DIGEST,
        version_digest=DIGEST,
        recipe=TrainingRecipe(**recipe),
        codec=CodecPolicy(codec=codec),
        max_update_bytes=1000,
        deadline_seconds=1.0,
    )


def with_modules(module: str) -> Terms:
    return terms(lora={"target_modules": [module * 600 + str(number) for number in range(1000)]})


class Asked:
    """Keeps what a person was asked, and answers."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.renewals = answer, list[Renewal]()

    def __call__(self, renewal: Renewal) -> bool:
        self.renewals.append(renewal)
        return self.answer


def agreement(home: Home, asked: Asked, known: Terms | None = None) -> Agreement:
    return Agreement(home, known or terms(), asked, Recorder(), "gym-client join")


def test_a_task_on_another_base_is_a_change_of_terms(home: Home) -> None:
    asked, other = Asked(False), "sha256:" + "1" * 64
    with pytest.raises(GymError) as caught:
        agreement(home, asked).require(task().model_copy(update={"base_digest": other}))
    assert caught.value.code is ErrorCode.TERMS_CHANGED
    assert asked.renewals[0].changes == (f'base: "{DIGEST}" -> "{other}"',)


def test_a_hub_that_makes_its_terms_long_takes_no_more_room_than_others(home: Home) -> None:
    for module in ("a", "b", "c"):
        kept = agreement(home, Asked(True), with_modules(module))
        kept.keep()
    assert kept.is_known()
    assert not agreement(home, Asked(True), with_modules("a")).is_known(), "the oldest goes first"
    assert home.consents_path.stat().st_size < 4 << 20


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", json.dumps({SERVER: 3}), json.dumps({SERVER: [{"data": "d"}]})]
)
def test_a_file_of_consents_that_was_damaged_is_named_and_consents_to_nothing(home: Home, text: str) -> None:
    home.consents_path.write_text(text)
    with pytest.raises(GymError, match="consents") as caught:
        agreement(home, Asked(True)).is_known()
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_task_of_the_same_terms_needs_no_consent_nor_does_a_falling_rate(home: Home) -> None:
    asked = Asked(False)
    agreed = agreement(home, asked, terms(learning_rate=1e-3))
    for rate in (1e-3, 5e-4, 1e-9):
        agreed.require(task(learning_rate=rate))
    assert not asked.renewals
    with pytest.raises(GymError):
        agreed.require(task(learning_rate=1e-2))


def test_another_pay_is_a_change_of_terms_and_needs_consent(home: Home) -> None:
    pay = RewardsConfig(score="estimate")
    known = Terms.of(SERVER, DIGEST, TrainingRecipe(), CodecPolicy(codec="bitdelta"), "", "rows", pay.terms())
    asked = Asked(False)
    agreed = agreement(home, asked, known)
    agreed.require(task().model_copy(update={"pay": pay.terms()}))
    for changes, line in (
        ({"pool": 10}, "pay.pool: 1000 -> 10"),
        ({"score": "improvement"}, 'pay.score: "estimate" -> "improvement"'),
        ({"quality_weight": 0.5}, "pay.quality_weight: 0.8 -> 0.5"),
        ({"similarity_threshold": 0.5}, "pay.similarity_threshold: 0.9 -> 0.5"),
        ({"together_threshold": None}, "pay.together_threshold: 0.6 -> null"),
        ({"stale_rounds": 9}, "pay.stale_rounds: 3 -> 9"),
        ({"reputation": ReputationConfig(cheating=0.3)}, "pay.reputation.cheating: 0.0 -> 0.3"),
    ):
        with pytest.raises(GymError) as caught:
            agreed.require(task().model_copy(update={"pay": pay.model_copy(update=changes).terms()}))
        assert caught.value.code is ErrorCode.TERMS_CHANGED
        assert asked.renewals[-1].changes == (line,)


def test_every_key_that_decides_what_is_earned_is_a_term() -> None:
    others = {"participation_weight", "hold_seconds"}  # the rest of quality_weight; when credits can be moved
    assert RewardsConfig.model_fields.keys() - PayTerms.model_fields.keys() == others
    assert ReputationConfig.model_fields.keys() == {
        key.removeprefix("pay.reputation.")
        for key in RewardsConfig().terms().values_by_key()
        if key.startswith("pay.reputation.")
    }


@pytest.mark.parametrize(
    "options",
    [{"x": "a" * 257}, {"x": 2**70}, {"x" * 65: 1}, {f"x{number}": 1 for number in range(33)}],
    ids=["a long value", "a large value", "a long name", "many"],
)
def test_options_of_a_score_that_a_hub_announces_are_bounded(options: dict[str, Any]) -> None:
    announced = RewardsConfig().terms().model_dump() | {"score": "estimate", "score_options": options}
    for schema, values in (
        (PayTerms, announced),
        (RewardsConfig, {"score": "estimate", "score_options": options}),
    ):
        with pytest.raises(ValidationError, match=r"should have at most|must fit 64 bits"):
            schema.model_validate(values)


def test_changed_terms_are_asked_for_once_and_remembered_for_the_next_join(home: Home) -> None:
    asked = Asked(True)
    first = agreement(home, asked)
    first.keep()
    first.require(task(max_steps=40))
    first.require(task(max_steps=40))
    (renewal,) = asked.renewals
    assert renewal.changes == ("recipe.max_steps: 50 -> 40",)
    for known in (terms(), terms(max_steps=40)):
        assert agreement(home, asked, known).is_known()
    first.require(task())  # back to what was agreed to before
    assert len(asked.renewals) == 1
    for other in (terms(max_steps=41), terms("other rows"), terms(server="s" + "1" * 16)):
        assert not agreement(home, asked, other).is_known()
    assert agreement(home, asked, terms(max_steps=41)).news() == ["recipe.max_steps: 40 -> 41"]


def test_who_does_not_agree_gets_the_command_and_is_asked_again(home: Home) -> None:
    asked = Asked(False)
    agreed = agreement(home, asked)
    for _ in range(2):
        with pytest.raises(GymError) as refused:
            agreed.require(task("int4", max_steps=40))
        assert refused.value.code is ErrorCode.TERMS_CHANGED
        name = terms(codec="int4", max_steps=40).name
        assert refused.value.hint == f"to accept exactly these terms: gym-client join --accept {name}"
    assert len(asked.renewals) == 2
    assert asked.renewals[0].changes == ('codec.codec: "bitdelta" -> "int4"', "recipe.max_steps: 50 -> 40")
    assert not home.consents_path.exists()


def test_an_agent_trains_nothing_on_terms_that_were_not_accepted_and_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    server = scene.client.pin.server or SERVER
    trained: list[str] = []

    def work(message: Any, context: Any) -> RecordDict:
        trained.append("trained")
        return empty(message, context)

    agent: Agent = scene.agent(work)
    agent._agreement = agreement(scene.home, Asked(False), terms(server=server))
    spec = task(server=server, max_steps=40).model_dump(mode="json")
    content = RecordDict({"task": ConfigRecord({"spec": json.dumps(spec)})})
    scene.hub.give(scene.task("m1", content))
    try:
        with pytest.raises(GymError) as refused:
            agent.run()
        assert refused.value.code is ErrorCode.TERMS_CHANGED
        assert not trained
        assert "terms-changed" in scene.error_of("m1").reason, "the hub need not wait for it"
    finally:
        scene.client.close()
        scene.hub.stop()


@pytest.mark.parametrize(
    ("consent", "agrees"),
    [
        (TerminalConsent(True, False), True),
        (TerminalConsent(False, False, accepted=["terms:x"]), True),
        (TerminalConsent(False, False, accepted=["terms:y"]), False),
        (TerminalConsent(False, False), False),
    ],
)
def test_changes_are_printed_before_they_are_accepted(
    consent: TerminalConsent, agrees: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert consent.renewed(Renewal("terms:x", ('recipe.algorithm: "sft" > "\x1b[2Jdpo"',))) is agrees
    shown = capsys.readouterr().err
    assert "recipe.algorithm" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("count", [3, 40])
def test_changes_fit_on_a_screen_with_the_question_or_say_where_all_are(
    count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.err, "_force_terminal", True)
    changes = tuple(f"recipe.key_{n}: {'x' * 20 * n} -> {n}" for n in range(count))
    TerminalConsent(True, False).renewed(Renewal("terms:x", changes))
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) <= 14
    assert max(map(len, shown)) <= 80
    assert (f"  all {count} in full: gym-client join --json" in shown) == (count == 40)


def test_a_program_reads_what_changed_and_how_to_accept_it(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalConsent(False, True).renewed(Renewal("terms:x", ("recipe.max_steps: 50 -> 40",)))
    assert json.loads(capsys.readouterr().out) == {
        "event": "terms-changed",
        "accept": "terms:x",
        "changes": ["recipe.max_steps: 50 -> 40"],
    }


def test_a_root_that_the_hub_names_later_needs_a_new_consent(tmp_path: Path) -> None:
    asked = Asked(False)
    passed_on = task().model_copy(update={"region": RegionConfig(root="s" + "1" * 16)})
    with pytest.raises(GymError) as caught:
        agreement(Home.open(tmp_path), asked).require(passed_on)
    assert caught.value.code is ErrorCode.TERMS_CHANGED
    assert asked.renewals[0].changes == ('region.root: null -> "s1111111111111111"',)


def test_mirrors_that_the_hub_names_later_need_a_new_consent() -> None:
    named = replace(terms(), asked={**terms().asked, "mirrors": ["mirror.example:9450"]})
    assert terms().changes(named) == ['mirrors: null -> ["mirror.example:9450"]']
