"""Evaluations at the gate: refused before the hub listens, compared with confidence, recorded with the round."""

from __future__ import annotations

import importlib.util
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gym_server.cli.show import ledger_lines
from gym_server.evaluations import versions
from gym_server.evaluations.gate import SuiteOutcome, TaskDrop, drop_of
from gym_server.evaluations.runner import main_value
from gym_server.evaluations.seeds import promise_seed, seed_of
from gym_server.federation import read_config
from gym_server.rewards.appraisal import split
from gym_server.rounds import merging
from gym_server.rounds.soups import Ingredients
from gym_server.store.tables import evaluation_seeds

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.sections import GateConfig, GateEvaluation
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.delta.base import model_tensors
from gym_fed.evaluation.records.reader import read_record
from gym_fed.evaluation.results import TaskResult
from gym_fed.trust.ledger.evaluations import commitment, drawn_rows
from tests.support.evaluations import choice_task
from tests.support.gated_hub import refusal, with_gate
from tests.support.judged_rounds import Judged
from tests.support.measured import measured_round

SUITE = {"suite": "tiny_cloze", "limit": 16, "max_drop": 0.02}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"suite": "tinny"}, "gate.evals.0.suite: no suite or task has this name; did you mean tiny"),
        ({"suite": "tiny", "limit": 2}, "gate.evals.0.limit"),
        ({"suite": "tiny", "max_drop": -1}, "gate.evals.0.max_drop"),
        ({"suite": "tiny", "confidence": 0.5}, "gate.evals.0.confidence"),
        ({"suite": "tiny", "most": 3}, "gate.evals.0.most: unknown key"),
    ],
)
def test_a_wrong_entry_is_refused_by_file_and_line(
    tmp_path: Path, tiny_base: Path, entry: dict[str, Any], said: str
) -> None:
    folder = with_gate(tmp_path / "hub", tiny_base, evals=[entry])
    with pytest.raises(GymError) as caught:
        read_config(folder)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert f"{folder / 'gym-server.yaml'}:" in caught.value.message
    assert said in caught.value.message


def test_a_suite_that_is_named_twice_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    with pytest.raises(GymError, match="suite 'tiny' is listed twice"):
        read_config(with_gate(tmp_path / "hub", tiny_base, evals=[{"suite": "tiny"}, {"suite": "tiny"}]))


def test_a_set_whose_rows_are_not_here_is_refused_with_the_command_that_fetches_it(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    error = refusal(with_gate(tmp_path / "hub", tiny_base, evals=[{"suite": "winogrande"}]))
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.message.startswith("gate.evals: ")
    assert "gym eval fetch winogrande, or set gate.evals_data" in error.hint


def test_a_member_of_a_group_that_does_not_exist_is_refused_at_the_start(
    tmp_path: Path, tiny_base: Path
) -> None:
    error = refusal(with_gate(tmp_path / "hub", tiny_base, evals=[{"suite": "tiny_capitol"}]))
    assert "tiny_capital" in error.hint


def test_a_missing_harness_is_refused_at_the_start(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a)
    )
    error = refusal(with_gate(tmp_path / "hub", tiny_base, evals=[SUITE]))
    assert error.code is ErrorCode.MISSING_DEPENDENCY
    assert "gym-fed[eval]" in error.hint


def test_a_drop_is_certain_only_where_rows_show_it() -> None:
    right = [True] * 60 + [False] * 4
    same = drop_of(choice_task("a", right), choice_task("a", right), 0.95)
    assert (same.drop, same.bound) == (0.0, 0.0)
    small = drop_of(choice_task("a", right), choice_task("a", [False] * 2 + right[2:]), 0.95)
    assert small.drop == pytest.approx(2 / 64)
    assert small.bound <= 0.02 < small.drop
    large = drop_of(choice_task("a", right), choice_task("a", [False] * 20 + right[20:]), 0.95)
    assert (large.before, large.after, large.num_samples) == (60 / 64, 40 / 64, 64)
    assert 0.2 < large.bound < large.drop


def test_a_higher_confidence_gives_a_lower_bound() -> None:
    before, after = choice_task("a", [True] * 64), choice_task("a", [False] * 16 + [True] * 48)
    assert drop_of(before, after, 0.99).bound < drop_of(before, after, 0.8).bound


def test_the_bound_is_one_sided_that_of_the_binomial() -> None:
    before, after = choice_task("a", [True] * 64), choice_task("a", [False] * 16 + [True] * 48)

    def quantile(share: float) -> float:
        ways = (math.comb(64, count) * 0.25**count * 0.75 ** (64 - count) for count in range(65))
        return next(count for count, sum_ in enumerate(itertools.accumulate(ways)) if sum_ >= share) / 64

    for confidence in (0.88, 0.93):  # neither share of resamples is near a step of the distribution
        assert quantile(1 - confidence) != quantile((1 - confidence) / 2)
        assert drop_of(before, after, confidence).bound == quantile(1 - confidence)


def test_the_worst_task_is_one_whose_bound_is_above_what_is_allowed() -> None:
    def outcome(*bounds: float) -> SuiteOutcome:
        drops = [TaskDrop(str(bound), "acc", 0.5, 0.4, 0.1, bound, 64) for bound in bounds]
        return SuiteOutcome(GateEvaluation.model_validate(SUITE), {}, {}, {}, drops, {})

    assert outcome(-0.1, 0.02).worst is None
    worst = outcome(0.01, 0.03, 0.05, 0.04).worst
    assert worst is not None
    assert worst.bound == 0.05


@pytest.mark.parametrize(("asked", "applied"), [(None, True), (False, False), (True, True)])
def test_versions_are_evaluated_with_the_gate_s_template_unless_asked(
    asked: bool | None, applied: bool, tmp_path: Path
) -> None:
    gate = GateConfig.model_validate({"evals": [{**SUITE, "apply_chat_template": True}]})
    config: Any = SimpleNamespace(gate=gate)
    assert versions._suite(config, tmp_path, "tiny_cloze", 8, asked).config.apply_chat_template is applied


def test_where_less_is_better_a_rise_is_the_drop() -> None:
    def errors(wrong: list[bool]) -> TaskResult:
        task = choice_task("a", wrong)
        figures = {name: replace(one, higher_is_better=False) for name, one in task.figures.items()}
        return replace(task, figures=figures)

    worse = drop_of(errors([False] * 64), errors([True] * 32 + [False] * 32), 0.95)
    assert worse.drop == 0.5
    assert worse.bound > 0.3
    assert main_value(errors([True, False])) == -0.5


def test_an_update_is_worth_what_the_evaluations_lose_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {("a", "b", "c"): 0.75, ("b", "c"): 0.25, ("a", "c"): 0.7, ("a", "b"): 0.85}
    manifests: Any = [SimpleNamespace(digest=name) for name in "abc"]
    given: Any = Ingredients(1, None, None, manifests, weights=[1.0, 2.0, 3.0])  # type: ignore[arg-type]
    weighed = []

    def soup(state: Any, without: Any, path: Path) -> Any:
        weighed.append(without.weights)
        return tuple(one.digest for one in without.manifests)

    monkeypatch.setattr(merging, "make_soup", soup)
    (tmp_path / "staging").mkdir()
    config: Any = SimpleNamespace(soup=SimpleNamespace(check_feasible=lambda count: None))
    state: Any = SimpleNamespace(folder=tmp_path)
    evaluation: Any = SimpleNamespace(value=values["a", "b", "c"], value_with=values.__getitem__)
    merged: Any = SimpleNamespace(ingredients=given)
    found = merging._added_to_evaluations(state, config, merged, evaluation, lambda: False)
    assert found == {"a": 0.5, "b": 0.05, "c": -0.1}
    assert weighed == [[2.0, 3.0], [1.0, 3.0], [1.0, 2.0]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Any:
    folder = tmp_path_factory.mktemp("evaluated") / "hub"
    gate = {"evals": [SUITE], "screen_updates": False}
    found = Judged(folder, tiny_base, gate=gate, soup={"codec": {"codec": "lattice"}})
    yield found
    found.close()


def test_an_evaluated_round_promises_a_seed_and_reveals_it_with_its_figures(hub: Judged) -> None:
    kinds_before = len(list(hub.fed.ledger.entries()))
    tiny = {name: 1e-6 * torch.ones_like(value) for name, value in hub.model.model.state_dict().items()}
    weights = {name: tiny[name] for name in hub.fed.base.shapes}
    found = hub.round({"ann": weights})
    assert found["ann"]["verdict"] == "merged"
    (promise,), (entry,) = hub.entries("evaluation-seed"), hub.entries("evaluated")
    head = hub.fed.round_store.head()
    seed = seed_of(hub.fed.database, promise["server_round"])
    assert promise["commitment"] == commitment(seed, promise["server_round"])
    assert (entry["seed"], entry["height"], entry["digest"]) == (seed.hex(), head.height, head.digest)
    assert entry["outcome"] == "committed"
    (suite,) = entry["suites"]
    task = suite["tasks"]["tiny_cloze"]
    assert (task["num_samples"], task["total_rows"]) == (16, 60)
    assert task["bound"] <= 0.02
    (line,) = [one for one in hub.fed.ledger.entries() if one.kind == "evaluated"]
    shown = ledger_lines(line.to_dict())
    assert len(shown) == 2
    assert f"tiny_cloze acc {task['before']:.4f} -> {task['after']:.4f}, drop {task['drop']:.4f}" in shown[1]
    assert shown[1].endswith(f"at least {task['bound']:.4f} (allowed 0.02), 16 of 60 rows")
    record = next(
        path
        for path in (hub.fed.folder / "evals").rglob("*.json")
        if file_sha256(path) == suite["records"]["after"]
    )
    samples = read_record(record).tasks["tiny_cloze"].samples
    assert [sample.number for sample in samples] == drawn_rows(seed, "tiny_cloze", 60, 16)
    kinds = [e.kind for e in hub.fed.ledger.entries()][kinds_before:]
    assert kinds.index("evaluation-seed") == 0
    assert kinds.index("version") < kinds.index("evaluated")
    with hub.fed.database.reading() as tx:
        assert len(tx.execute(evaluation_seeds.select()).all()) == 1


def test_a_seed_that_was_promised_is_not_drawn_again(hub: Judged) -> None:
    (promise,) = hub.entries("evaluation-seed")
    before = seed_of(hub.fed.database, promise["server_round"])
    with hub.fed.database.transaction() as tx:
        promise_seed(tx, hub.fed.ledger, promise["server_round"])
    assert seed_of(hub.fed.database, promise["server_round"]) == before
    assert hub.entries("evaluation-seed") == [promise]


def test_a_round_draws_other_rows_than_the_one_before(hub: Judged) -> None:
    before = hub.entries("evaluated")
    seeds = {seed_of(hub.fed.database, body["server_round"]) for body in hub.entries("evaluation-seed")}
    hub.fed.round_store.abort(hub.fed.round_store.open_next().server_round, "nobody came")
    later = [body["server_round"] for body in hub.entries("evaluation-seed")]
    assert len({seed_of(hub.fed.database, number) for number in later}) == len(seeds) + 1
    assert hub.entries("evaluated") == before, "no rows were used, so that the seed stays secret"


def rewarded(**changes: Any) -> RewardsConfig:
    return RewardsConfig(pool=1000, score_on="evals", evals_share=0.3, participation_ramp=False, **changes)


@pytest.mark.parametrize(
    ("evals", "expected"),
    [
        ({"ann": 0.3, "bob": 0.1}, {"ann": 350 + 225, "bob": 350 + 75}),
        ({"ann": 0.3, "bob": -0.2}, {"ann": 350 + 300, "bob": 350}),
        ({"ann": -0.3, "bob": 0.0}, {"ann": 500, "bob": 500}),
        ({}, {"ann": 500, "bob": 500}),
    ],
)
def test_a_part_of_the_pool_is_split_by_evaluations_and_nothing_is_lost(
    evals: dict[str, float], expected: dict[str, int]
) -> None:
    found = split(rewarded(), {"ann": 0.0, "bob": 0.0}, evals=evals)
    assert found.credits == expected
    assert sum(found.credits.values()) == 1000


def test_contributors_who_are_paid_as_one_get_one_part_by_evaluations() -> None:
    found = split(
        rewarded(),
        dict.fromkeys(("ann", "bob", "eve"), 0.0),
        together=lambda _: [["bob", "eve"]],
        evals={"ann": 0.2, "bob": 0.2, "eve": 0.2},
    )
    assert found.credits == {"ann": 500, "bob": 250, "eve": 250}


def test_a_linked_key_whose_update_harms_lowers_no_mean_of_evaluations() -> None:
    scores = {"ann": 0.02, "bob": 0.02, "eve": -0.02}
    found = split(
        rewarded(),
        dict.fromkeys(scores, 0.0),
        measured_round(scores),
        together=lambda _: [["bob", "eve"]],
        evals={"ann": 0.2, "bob": 0.2, "eve": -0.2},
    )
    assert found.evals_pool == found.by_evals == 60, "0.3 of the price of 0.02 nats"
    assert found.credits == {"ann": 100, "bob": 50, "eve": 50}, "together the price of 0.02 nats"


@pytest.mark.parametrize(("gain", "paid"), [(-0.1, 0), (0.0002, 2)])
def test_evaluations_pay_no_more_than_their_share_of_what_a_measured_round_gained(
    gain: float, paid: int
) -> None:
    scores = {"ann": gain, "bob": 0.0}
    found = split(
        rewarded(), dict.fromkeys(scores, 0.0), measured_round(scores), evals={"ann": 0.5, "bob": 0.0}
    )
    assert sum(found.credits.values()) <= paid
    assert found.left == 1000 - sum(found.credits.values())


def test_credits_by_evaluations_without_evaluations_are_refused(tmp_path: Path, tiny_base: Path) -> None:
    folder = with_gate(tmp_path / "hub", tiny_base, max_loss_increase=0.1)
    with pytest.raises(
        GymError, match=r"rewards\.score_on 'evals' is measured on evaluations; set gate\.evals"
    ):
        read_config(folder, ("rewards.score_on=evals",))


def test_a_round_pays_its_pool_and_records_what_each_update_added(tmp_path: Path, tiny_base: Path) -> None:
    hub = Judged(
        tmp_path / "hub",
        tiny_base,
        gate={"evals": [{**SUITE, "max_drop": 1.0}], "screen_updates": False},
        rewards={"score_on": "evals", "together_threshold": None},
    )
    try:
        sent = {name: hub.trained(name, seed) for seed, name in enumerate(("ann", "bob"))}
        found = hub.round(sent)
        assert sum(one["credit"] for one in found.values()) == hub.fed.config.rewards.pool
        (entry,) = hub.entries("contribution")
        assert len(entry["evals"]["scores"]) == 2
        assert entry["evals"]["pool"] in (0, 200)
    finally:
        hub.close()


def test_updates_that_cancel_each_other_leave_a_round_whose_credits_are_not_split_by_evaluations(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub = Judged(
        tmp_path / "hub",
        tiny_base,
        gate={"evals": [{"suite": "tiny_cloze", "limit": 8, "max_drop": 1.0}], "screen_updates": False},
        rewards={"score_on": "evals", "together_threshold": None},
    )
    try:
        noise = {k: 1e18 * torch.randn_like(v) for k, v in model_tensors(hub.model.model).items()}
        hub.round({"eve": noise, "mal": {name: -value for name, value in noise.items()}})
        (entry,) = hub.entries("contribution")
        assert entry["evals"]["scores"] == {}
        assert [one["outcome"] for one in hub.entries("evaluated")] == ["committed"]
    finally:
        hub.close()


def test_a_round_of_as_many_updates_as_the_buckets_need_is_not_split_by_evaluations(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub = Judged(
        tmp_path / "hub",
        tiny_base,
        rounds={"min_contributors": 5},
        soup={"aggregator": "caf", "num_malicious_nodes": 1, "pre_aggregators": ["bucketing"]},
        gate={"evals": [{"suite": "tiny_cloze", "limit": 8, "max_drop": 1.0}], "screen_updates": False},
        rewards={"score_on": "evals", "together_threshold": None},
    )
    try:
        base = model_tensors(hub.model.model).items()
        hub.round({name: {k: 1e-4 * torch.randn_like(v) for k, v in base} for name in "abcde"})
        (entry,) = hub.entries("contribution")
        assert entry["evals"]["scores"] == {}, "four updates make too few buckets"
    finally:
        hub.close()
