"""What new contributors were paid before the hub could tell them apart is settled by their first comparison."""

from __future__ import annotations

import pytest
from gym_server.rewards.settlements import Settlement, settle
from gym_server.rewards.split import Split, split

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.soup.credit import RunningScore
from tests.support.measured import even, measured_round

KEYS = ["eve1", "eve2", "eve3", "eve4"]
PEOPLE = ["ann", "bob", "cat"]
EQUALLY = RewardsConfig(participation_ramp=False)


def rounds_of(names: list[str], linked: list[str], count: int) -> list[Split]:
    """Rounds in which ``linked`` are linked once contributors can be compared, from the second round on."""
    found: list[Split] = []
    for number in range(count):
        found.append(
            split(
                EQUALLY,
                dict.fromkeys(names, 0.0),
                together=lambda _, later=number > 0: [linked] if later and len(linked) > 1 else [],
                settlements=found[-1].settlements if found else {},
                comparable=names if number else (),
            )
        )
    return found


def total(rounds: list[Split], names: list[str]) -> int:
    return sum(one.credits[who] for one in rounds for who in names)


def test_many_keys_of_one_contributor_earn_no_more_than_one_from_the_first_round_on() -> None:
    single, many = rounds_of([*PEOPLE, "eve1"], ["eve1"], 4), rounds_of([*PEOPLE, *KEYS], KEYS, 4)
    assert total(many[:1], KEYS) > total(single[:1], ["eve1"]), "one round cannot tell them apart"
    assert total(many[:3], KEYS) <= total(single[:3], ["eve1"])
    assert [sum(one.credits.values()) for one in many] == [1000] * 4, "nothing is lost"
    assert total(many[3:], KEYS) == 250
    assert total(many, PEOPLE) >= total(single, PEOPLE)
    last = many[-1].settlements
    assert {(one.provisional, one.owed) for one in last.values()} == {(None, 0)}


def test_who_is_not_linked_owes_nothing() -> None:
    found = rounds_of(PEOPLE, [], 3)
    assert found[0].settlements == {who: Settlement(found[0].credits[who]) for who in PEOPLE}
    assert found[2].settlements == dict.fromkeys(PEOPLE, Settlement(None))
    assert {one.credits[who] for one in found for who in PEOPLE} <= {333, 334}


def test_a_new_key_that_is_linked_to_a_known_contributor_owes_its_first_pay_and_the_other_nothing() -> None:
    before = {"ann": Settlement(None), "new": Settlement(25), "bob": Settlement(None)}
    earned = {"ann": 250, "new": 250, "bob": 500}
    credits, after = settle(before, earned, [["ann", "new"]], earned)
    assert credits == {"ann": 258, "new": 225, "bob": 517}
    assert after == dict.fromkeys(before, Settlement(None))


def test_scores_are_paid_from_the_second_merged_update_on_and_for_the_first_too() -> None:
    config, names = RewardsConfig(score="estimate"), [*PEOPLE, *KEYS]
    first = split(
        config, dict.fromkeys(names, 0.0), measured_round(dict.fromkeys(names, 0.01)), settlements={}
    )
    taking_part = config.weights[1] * config.credits_per_nat * 0.01
    assert first.credits == dict.fromkeys(names, pytest.approx(taking_part)), (
        "whose keys are whose is unknown yet"
    )
    assert first.left == config.pool - len(names) * taking_part
    again = measured_round(
        dict.fromkeys(PEOPLE, 0.01),
        running_scores=first.running_scores,
        run=first.run,
        shared=first.shared,
    )
    second = split(
        config,
        dict.fromkeys(PEOPLE, 0.0),
        again,
        carried=first.left,
        settlements=first.settlements,
        comparable=PEOPLE,
    )
    by_score = config.weights[0] * config.credits_per_nat * 2 * 0.01
    assert second.credits == dict.fromkeys(PEOPLE, pytest.approx(by_score + taking_part, abs=1))
    assert second.left == first.left + config.pool - sum(second.credits.values()), (
        "keys that left have no score"
    )


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "nothing is compared"])
def test_scores_are_paid_at_once_where_nobody_can_be_told_apart(alone: bool) -> None:
    names = ["ann"] if alone else PEOPLE
    found = split(
        RewardsConfig(score="estimate"),
        dict.fromkeys(names, 0.0),
        measured_round(dict.fromkeys(names, 0.01)),
        settlements={} if alone else None,
    )
    assert found.credits == dict.fromkeys(names, 100)


def test_the_first_scores_of_a_new_key_that_is_linked_to_a_known_contributor_count_as_nothing() -> None:
    names = ["ann", "bob", "new"]
    before = {who: RunningScore(even(0.02)) for who in names}
    found = split(
        RewardsConfig(score="estimate"),
        dict.fromkeys(names, 0.0),
        measured_round(dict.fromkeys(names, 0.02), running_scores=before),
        together=lambda _: [["ann", "new"]],
        settlements={"ann": Settlement(None), "bob": Settlement(None), "new": Settlement(10)},
        comparable=names,
    )
    brought = {who: one.brought for who, one in found.running_scores.items()}
    assert brought["ann"] + brought["new"] == pytest.approx(brought["bob"])
    assert brought["new"] == pytest.approx(brought["ann"] - 0.02)


def test_duplicates_and_groups_that_shared_their_first_pay_are_not_charged_for_it_again() -> None:
    earned = {"ann": 100, "copy": 100, "bob": 125, "bob2": 125}
    _, after = settle({}, (), [["bob", "bob2"], ["ann", "copy"]], earned)
    assert after == dict.fromkeys(earned, Settlement(None))


@pytest.mark.parametrize("second", ["the same bytes", "linked by the cosines of the round"])
def test_first_pay_of_keys_that_were_paid_as_one_before_a_comparison_is_owed(second: str) -> None:
    names = dict.fromkeys([*PEOPLE, *KEYS], 0.0)
    first = split(EQUALLY, names, settlements={})
    same_bytes = second == "the same bytes"
    found = split(
        EQUALLY,
        names,
        together=lambda _: [] if same_bytes else [KEYS],
        duplicates={KEYS[0]: KEYS[1:]} if same_bytes else {},
        settlements=first.settlements,
        comparable=names if same_bytes else PEOPLE,
    )
    withheld = 250 - sum(found.credits[who] for who in KEYS)
    owed = sum(found.settlements[who].owed for who in KEYS)
    paid = [first.credits[who] for who in KEYS]
    assert withheld + owed == sum(paid) - max(paid)
    assert {found.settlements[who].provisional for who in KEYS} == {None}
    assert sum(found.credits.values()) == 1000


def test_the_running_scores_of_new_keys_that_send_the_same_work_become_those_of_one() -> None:
    names = ["ann", "eve1", "eve2"]
    found = split(
        RewardsConfig(score="estimate"),
        dict.fromkeys(names, 0.0),
        measured_round(
            {"ann": 0.01, "eve1": 0.01}, running_scores={who: RunningScore(even(0.02)) for who in names}
        ),
        duplicates={"eve1": ["eve2"]},
        settlements=dict.fromkeys(names, Settlement(10)),
    )
    brought = {who: one.brought for who, one in found.running_scores.items()}
    assert brought == pytest.approx({"ann": 0.03, "eve1": 0.015, "eve2": 0.015})


def test_who_owes_pays_the_others_by_and_by_and_nothing_without_others() -> None:
    before = {"eve1": Settlement(300), "eve2": Settlement(200), "ann": Settlement(None)}
    earned = {"eve1": 60, "eve2": 60, "ann": 30}
    credits, after = settle(before, earned, [["eve1", "eve2"]], earned)
    assert credits == {"eve1": 0, "eve2": 0, "ann": 150}
    assert sum(one.owed for one in after.values()) == 200 - 120
    alone = {"eve1": 60, "eve2": 60}
    credits, again = settle(after, (), [], alone)
    assert credits == alone
    assert again == {who: after[who] for who in alone}


def test_the_running_scores_of_linked_new_keys_become_those_of_one() -> None:
    config, names = RewardsConfig(score="estimate"), [*PEOPLE[:2], "eve1", "eve2"]
    first = split(
        config, dict.fromkeys(names, 0.0), measured_round(dict.fromkeys(names, 0.01)), settlements={}
    )
    assert first.credits["eve1"] == first.credits["ann"]
    later = measured_round(dict.fromkeys(names, 0.01), running_scores=first.running_scores, run=first.run)
    found = split(
        config,
        dict.fromkeys(names, 0.0),
        later,
        together=lambda _: [["eve1", "eve2"]],
        settlements=first.settlements,
        comparable=names,
    )
    eve, ann = (
        sum(one.credits[who] for one in (first, found) for who in people)
        for people in (["eve1", "eve2"], ["ann"])
    )
    assert eve <= ann
    brought = {who: one.brought for who, one in found.running_scores.items()}
    assert brought["eve1"] + brought["eve2"] == pytest.approx(brought["ann"])
    assert brought["eve1"] == pytest.approx(brought["eve2"])
    known = {"eve1": RunningScore(even(0.5)), "eve2": RunningScore(even(0.5))}
    kept = split(
        config,
        dict.fromkeys(names, 0.0),
        measured_round(dict.fromkeys(names, 0.01), running_scores=known),
        together=lambda _: [["eve1", "eve2"]],
        settlements=dict.fromkeys(names, Settlement(None)),
        comparable=names,
    )
    assert kept.running_scores["eve1"].brought > 0.5, "those of contributors compared before stay"


def test_a_first_score_of_harm_takes_nothing_from_the_contributor_that_it_is_linked_with() -> None:
    before = {"ann": RunningScore(even(0.02)), "eve": RunningScore(even(-0.03))}
    scores = {"ann": 0.02, "bob": 0.02, "eve": -0.02}
    found = split(
        RewardsConfig(score="estimate"),
        dict.fromkeys(scores, 0.0),
        measured_round(scores, 0.06, running_scores=before),
        together=lambda _: [["ann", "eve"]],
        settlements={"ann": Settlement(40), "eve": Settlement(40)},
        comparable=["ann", "eve"],
    )
    brought = {who: one.brought for who, one in found.running_scores.items()}
    assert brought == pytest.approx({"ann": 0.04, "bob": 0.02, "eve": -0.05})
