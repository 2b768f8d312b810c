"""A hub with privacy: what it refuses, what a round costs and leaves behind, and where it stops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from flwr.serverapp import Grid
from gym_server.cli.run import run_hub
from gym_server.cli.show import privacy_lines
from gym_server.federation import Federation
from gym_server.privacy import budget as privacy
from gym_server.privacy import merge as private_merge
from gym_server.rounds.admission import UpdateSubmission
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.replay import replay
from gym_server.rounds.round_store import RoundStore
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.rpc.transfers import Transfers
from gym_server.store.tables import privacy_seeds, privacy_spending, updates
from gym_server.strategy import DeltaSoup
from sqlalchemy import select, update

from gym_fed.base.models import load_model
from gym_fed.config.hub.privacy import PrivacyConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from gym_fed.config.train.training import LoraSettings
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.evaluation.loss import RowLosses
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.training.tuning.lora import add_lora, frozen_factor, lora_factors
from tests.support.private_hub import NAMES, PRIVATE, PrivateRounds, private_hub

ONE = epsilon([NoiseEvent(noise_multiplier=1.0)], 1e-5)
TWO = epsilon([NoiseEvent(noise_multiplier=1.0, count=2)], 1e-5)


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[PrivateRounds]:
    with Federation.open(private_hub(tmp_path / "hub", tiny_base)) as fed:
        yield PrivateRounds(fed)


def change(hub: PrivateRounds, section: str, **values: Any) -> None:
    """As after a restart with an edited config."""
    config = hub.fed.config
    part = getattr(config, section).model_copy(update=values)
    hub.fed.config = config.model_copy(update={section: part})


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"admission": {}}, r"write admission: \{norm_ratio: null\}"),
        ({"admission": {"norm_ratio": None, "max_norm": 3.0}}, r"write admission: \{max_norm: null\}"),
        ({"gate": {}}, r"write gate: \{screen_updates: false\}"),
        (
            {"root": {"data": "root.jsonl"}},
            r"root mean does not judge each update .* separately; .* write soup: \{aggregator: root_gate\}",
        ),
        (
            {
                "root": {"data": "root.jsonl"},
                "soup": {"aggregator": "fltrust", "num_malicious_nodes": 0},
            },
            r"root fltrust does not judge each update .* separately; .* write soup: \{aggregator: root_gate\}",
        ),
        ({"recipe": {"finetuning": "lora"}}, r"write recipe: \{lora: \{freeze_a: true\}\}"),
        (
            {"rewards": {"score": "shapley"}, "gate": {"heldout": "h", "screen_updates": False}},
            "rewards.score",
        ),
        ({"rewards": {}}, "rewards.similarity_threshold"),
        ({"soup": {"aggregator": "krum", "num_malicious_nodes": 0}}, "has no known bound"),
        ({"soup": {"aggregator": "mean", "weighting": "num_examples", "num_examples_cap": 3}}, "use uniform"),
        ({"soup": {"aggregator": "mean", "max_norm": 1.0}}, "clipping_norm clips updates; remove it"),
    ],
    ids=[
        "norm_ratio",
        "max_norm",
        "screen_updates",
        "root",
        "root of another rule",
        "lora",
        "scores",
        "similarity",
        "aggregator",
        "num_examples",
        "soup.max_norm",
    ],
)
def test_what_would_reveal_an_update_past_the_noise_is_refused_with_the_remedy(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ServerConfig.model_validate({**PRIVATE, **changes})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, "mean"),
        ({"root": {"data": "root.jsonl"}}, "root_gate"),
        ({"privacy": {"epsilon": 30.0, "mechanism": "discrete_gaussian"}}, "majority_vote"),
        ({"root": {"data": "root.jsonl"}, "privacy": None}, "byzantine_evidence"),
    ],
)
def test_without_a_rule_privacy_selects_the_accounted_one_that_withstands_most(
    changes: dict[str, Any], rule: str
) -> None:
    soup = {"codec": {"codec": "dense", "error_feedback": False}}
    assert ServerConfig.model_validate({**PRIVATE, "soup": soup, **changes}).soup.aggregator == rule


def test_the_same_without_privacy_is_taken() -> None:
    ServerConfig.model_validate({**PRIVATE, "privacy": None, "admission": {}, "gate": {}, "rewards": {}})


def rewrite(folder: Path, **sections: Any) -> None:
    """Replace sections of a hub's config file; None removes one."""
    path = folder / "gym-server.yaml"
    values = {**yaml.safe_load(path.read_text()), **sections}
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))


def test_a_hub_that_promised_privacy_to_somebody_will_not_run_without(
    tmp_path: Path, tiny_base: Path
) -> None:
    folder = private_hub(tmp_path / "hub", tiny_base)
    with Federation.open(folder) as fed:
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)
    rewrite(folder, privacy=None)
    with Federation.open(folder) as fed:
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)  # nobody has heard it
    rewrite(folder, privacy=PRIVATE["privacy"])
    with Federation.open(folder) as fed:
        PrivateRounds(fed).collect()
    rewrite(folder, privacy=None)
    with Federation.open(folder) as fed, pytest.raises(GymError, match="restore the privacy section"):
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (None, {}, "it began before privacy was promised"),
        ({}, {"epsilon": 31.0}, "it began under a stronger promise of privacy"),
        ({}, {"epsilon": 29.0}, None),
    ],
)
def test_a_round_that_began_under_less_of_a_promise_is_not_merged_under_another(
    tmp_path: Path, tiny_base: Path, before: Any, now: dict[str, Any], reason: str | None
) -> None:
    recorded = None if before is None else {**PRIVATE["privacy"], **before}
    folder = private_hub(tmp_path / "hub", tiny_base, privacy=recorded)
    with Federation.open(folder) as fed:
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)
        PrivateRounds(fed).collect(send=False)
    rewrite(folder, privacy={**PRIVATE["privacy"], **now})
    with Federation.open(folder) as fed:
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)
        current = fed.round_store.current()
        assert current is not None
        assert (current.state, current.reason) == (("aborted", reason) if reason else ("collecting", ""))


def test_privacy_is_not_promised_after_rounds_without_noise(tmp_path: Path, tiny_base: Path) -> None:
    folder = private_hub(tmp_path / "hub", tiny_base, privacy=None)
    with Federation.open(folder) as fed:
        assert PrivateRounds(fed).run().state == "committed"
        assert privacy.report(fed.config, fed.database)["rounds_without_noise"] == 1
    rewrite(folder, privacy=PRIVATE["privacy"])
    with (
        Federation.open(folder) as fed,
        pytest.raises(GymError, match="this hub merged 1 round without"),
    ):
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)


def test_noise_that_cannot_be_drawn_is_refused_before_it_is_charged(tmp_path: Path, tiny_base: Path) -> None:
    with pytest.raises(ValueError, match="too large to sample"):
        PrivacyConfig(epsilon=30.0, adaptive_clipping={"count_noise_std": 0.5000000001})  # type: ignore[arg-type]
    votes = {"mechanism": "discrete_gaussian", "noise_multiplier": 1000.0, "epsilon": 30.0}
    with Federation.open(private_hub(tmp_path / "hub", tiny_base, privacy=votes)) as fed:
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)
        fed.base = replace(fed.base, shapes={"weight": (300_000_000,)})
        with pytest.raises(GymError, match="300000000 weights is too large"):
            privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)


def test_a_budget_below_one_round_is_refused_before_anybody_trains(tmp_path: Path, tiny_base: Path) -> None:
    folder = private_hub(tmp_path / "hub", tiny_base, privacy={"noise_multiplier": 1.0, "epsilon": 1.0})
    with (
        Federation.open(folder) as fed,
        pytest.raises(GymError, match="not enough for one round, which costs 4") as e,
    ):
        privacy.check_promise(fed.config, fed.base, fed.database, fed.round_store)
    assert e.value.code is ErrorCode.CONFIG_INVALID


# ---- a round ----


def test_a_round_costs_its_contributors_what_every_report_shows_and_replays_to_the_bit(
    hub: PrivateRounds,
) -> None:
    fed = hub.fed
    assert privacy.promise(fed.config, fed.database)["epsilon_spent"] == 0.0
    assert privacy.promise(fed.config, fed.database)["epsilon_after_next_round"] == pytest.approx(ONE)
    assert hub.run().state == hub.run().state == "committed"
    recorded = [body["epsilon"] for body in hub.entries("privacy")]
    assert recorded == [pytest.approx(ONE), pytest.approx(TWO)]
    assert [body["server_round"] for body in hub.entries("privacy")] == [1, 2]
    central = json.loads(privacy.status_json(fed.config, fed.database))["central"]
    assert central["epsilon_spent"] == pytest.approx(TWO)
    assert central["epsilon"] == 30.0
    assert "zero-out" in central["adjacency"]
    assert central["sampling"].startswith("none")
    for name in NAMES:
        found = privacy.account_of(fed.config, fed.database, hub.keys[name].contributor)
        assert found == {"epsilon": pytest.approx(TWO), "target_delta": 1e-5, "rounds": 2}
        account = Hub(fed, Wakeups())._account(hub.keys[name].contributor)
        assert json.loads(account.rewards_json)["privacy"] == found
    assert privacy.account_of(fed.config, fed.database, "c00000000000000000000000000000000")["epsilon"] == 0.0
    report = privacy.report(fed.config, fed.database)
    assert [row["epsilon"] for row in report["contributors"]] == [pytest.approx(TWO)] * 3
    assert report["rounds_without_noise"] == 0
    assert replay(fed.state, 1)["soup"] != replay(fed.state, 2)["soup"]
    with fed.database.transaction() as tx:
        tx.execute(update(privacy_spending).values(noise_multiplier=5.0))
    with pytest.raises(GymError, match="ledger"):
        fed.ledger.verify()


def test_nothing_that_others_see_names_an_updates_digest_norm_or_size(hub: PrivateRounds) -> None:
    fed, number = hub.fed, hub.collect()
    paths = [hub.delta(name, number) for name in NAMES]
    secrets = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    for path in paths:
        with DeltaFile.open(path) as delta:
            secrets.append(repr(delta.norm())[:9])
    hub.finish(number)
    seen = [json.dumps(entry.body) for entry in fed.ledger.entries()]
    status = Hub(fed, Wakeups())._status()
    seen += [status.privacy_json, status.recipe_json, str(status)]
    soup = fed.store.local_path(fed.round_store.soups()[0].sha256).read_bytes()
    seen.append(soup[:4096].decode("latin-1"))
    with fed.database.reading() as tx:
        seeds = tx.scalars(select(privacy_seeds.c.seed)).all()
    secrets += [seed.hex() for seed in seeds]
    assert len(secrets) == 7
    for secret in secrets:
        assert not [text for text in seen if secret in text], secret


def test_a_refusal_is_in_the_record_sealed_and_its_reason_for_the_contributor_alone(
    hub: PrivateRounds,
) -> None:
    number = hub.collect()
    receipt = hub.send("ann", number, hub.delta("ann", 77))
    assert "already sent update" in receipt.reason
    assert hub.entries("verdict") == []
    assert hub.entries("sealed")[-1].keys() == {
        "server_round",
        "seal",
        "record",
        "at",
        "at_bucket_seconds",
        "heads",
    }


def test_a_forged_update_is_in_the_record_by_one_code_whatever_is_wrong_with_it(hub: PrivateRounds) -> None:
    number, judge = hub.collect(), hub.fed.admission.judge
    submissions: list[UpdateSubmission] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.fed.admission, "judge", lambda submission, also: submissions.append(submission))
        hub.send("ann", number, hub.delta("ann", 77))
    (good,) = submissions
    forged = [
        replace(good, signature=bytes(64)),
        replace(good, manifest_json="{}"),
        replace(good, contributor=hub.keys["bob"].contributor),
    ]
    codes = set()
    for submission in forged:
        with pytest.raises(GymError) as refused:
            judge(submission, lambda tx, receipt: None)
        codes.add(refused.value.code)
    assert codes == {ErrorCode.SIGNATURE_INVALID, ErrorCode.UPDATE_REFUSED}
    assert {entry["reason"] for entry in hub.entries("verdict")} == {"update-refused"}


def test_a_guess_at_somebodys_file_is_not_confirmed(hub: PrivateRounds) -> None:
    number = hub.collect()
    data = hub.delta("bob", number).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    transfers = Transfers(hub.fed.database, hub.fed.store, hub.fed.max_update_bytes, private=True)
    assert transfers.begin("c-guesser", sha256, len(data)).complete is False
    for wanted in (sha256, "0" * 64):
        with pytest.raises(GymError, match="was not uploaded"):
            transfers.check_sent("c-guesser", wanted)
    open_hub = Transfers(hub.fed.database, hub.fed.store, hub.fed.max_update_bytes)
    assert open_hub.begin("c-guesser", sha256, len(data)).complete is True


# ---- crashes ----


def test_a_merge_that_a_crash_cut_off_is_done_again_with_the_same_noise(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = private_hub(tmp_path / "hub", tiny_base)
    soups: list[str] = []

    def crash(self: RoundStore, merged: Any, soup: Any, also: Any = None) -> None:
        soups.append(soup.sha256)
        raise KeyboardInterrupt

    with Federation.open(folder) as fed:
        number = PrivateRounds(fed).collect()
        with monkeypatch.context() as patched:
            patched.setattr(RoundStore, "commit", crash)
            with pytest.raises(KeyboardInterrupt):
                DeltaSoup(fed).aggregate_train(number, [])
    with Federation.open(folder) as fed:
        with fed.database.reading() as tx:
            assert not tx.execute(select(privacy_spending)).all()  # nobody saw it
        DeltaSoup(fed).aggregate_train(number, [])
        assert [soup.sha256 for soup in fed.round_store.soups()] == soups
        with fed.database.reading() as tx:
            assert len(tx.execute(select(privacy_seeds)).all()) == 1
            assert len(tx.execute(select(privacy_spending)).all()) == 3


def test_another_list_or_other_rules_never_get_the_same_seed(hub: PrivateRounds) -> None:
    hub.collect()
    current = hub.fed.round_store.current()
    assert current is not None

    def seed(merging: list[str]) -> bytes:
        found = private_merge.begin_merge(
            hub.fed.config, hub.fed.base, hub.fed.database, current.spec, merging
        )
        assert found is not None
        return found.seed

    first = seed(["a", "b"])
    assert seed(["b", "a"]) == first
    assert seed(["a", "c"]) != first
    change(hub, "privacy", noise_multiplier=2.0)
    assert seed(["a", "b"]) != first


# ---- the budget ----


def test_a_round_that_the_gate_rolls_back_costs_as_much_as_one_that_stays(
    hub: PrivateRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HubModel, "has_gate", property(lambda self: True))
    one = np.ones(1)
    monkeypatch.setattr(HubModel, "losses", lambda self: RowLosses(one, one))
    monkeypatch.setattr(HubModel, "losses_with", lambda self, path: RowLosses(9.0 * one, one))
    ended = hub.run()
    assert ended.state == "aborted"
    assert "rolled back" in ended.reason
    assert privacy.promise(hub.fed.config, hub.fed.database)["epsilon_spent"] == pytest.approx(ONE)
    assert len(hub.entries("privacy")) == 1


def test_a_round_without_a_quorum_costs_nothing(hub: PrivateRounds) -> None:
    number = hub.collect()
    change(hub, "rounds", min_contributors=9)
    assert hub.finish(number).state == "aborted"
    assert privacy.promise(hub.fed.config, hub.fed.database)["epsilon_spent"] == 0.0


def test_the_run_ends_at_its_budget_and_stays_ended_after_a_restart(tmp_path: Path, tiny_base: Path) -> None:
    short = {"noise_multiplier": 1.0, "epsilon": (ONE + TWO) / 2, "end_when_spent": True}
    folder = private_hub(tmp_path / "hub", tiny_base, privacy=short)
    with Federation.open(folder) as fed:
        rounds = PrivateRounds(fed)
        assert not privacy.is_spent(fed.config, fed.database)
        rounds.run()
    for _ in range(2):
        with Federation.open(folder) as fed:
            assert privacy.is_spent(fed.config, fed.database)
            DeltaSoup(fed).start(cast("Grid", None))  # requests nobody from the grid
            current = fed.round_store.current()
            assert current is not None
            assert (current.server_round, current.state) == (1, "committed")
            assert privacy.end_of_run(fed.config, fed.database, fed.round_store).startswith(
                "the privacy budget is spent: epsilon 4.38 of "
            )


def test_a_hub_that_has_spent_its_budget_says_so_at_its_end(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"noise_multiplier": 1.0, "epsilon": (ONE + TWO) / 2, "end_when_spent": True}
    folder = private_hub(tmp_path / "hub", tiny_base, privacy=short)
    with Federation.open(folder) as fed:
        PrivateRounds(fed).run()
        shown = list(privacy_lines(privacy.report(fed.config, fed.database)))
    assert "no further round starts: it would exceed the budget" in shown
    monkeypatch.setattr("gym_server.cli.run._DRAIN_SECONDS", 0.0)
    ending = run_hub(folder, exit_when_done=True, insecure=True)
    assert ending.startswith("the privacy budget is spent: epsilon 4.38 of ")


def test_a_round_that_a_lowered_budget_forbids_is_aborted_before_its_noise(hub: PrivateRounds) -> None:
    hub.run()
    hub.collect()
    change(hub, "privacy", epsilon=ONE)
    hub.strategy.start(cast("Grid", None))
    current = hub.fed.round_store.current()
    assert current is not None
    assert (current.state, current.reason) == ("aborted", "the privacy budget is spent")
    assert len(hub.entries("privacy")) == 1


# ---- adaptive clipping, LoRA, votes ----


def test_an_adapted_norm_is_what_the_next_round_clips_to_also_after_a_restart(
    tmp_path: Path, tiny_base: Path
) -> None:
    adaptive = {"count_noise_std": 1.0, "target_quantile": 0.01, "learning_rate": 0.5}
    folder = private_hub(
        tmp_path / "hub",
        tiny_base,
        privacy={"clipping_norm": 100.0, "epsilon": 30.0, "adaptive_clipping": adaptive},
    )
    with Federation.open(folder) as fed:
        rounds = PrivateRounds(fed)
        rounds.run()
        left = rounds.entries("version")[0]["privacy"]["next_clipping_norm"]
        assert left != 100.0
    with Federation.open(folder) as fed:
        assert privacy.promise(fed.config, fed.database)["clipping_norm"] == left
        rounds = PrivateRounds(fed)
        rounds.run()
        assert rounds.entries("version")[1]["privacy"]["clipping_norm"] == left
        assert rounds.entries("privacy")[1]["clipping_norm"] == left
        assert [body["epsilon"] for body in rounds.entries("privacy")] == [
            pytest.approx(ONE),
            pytest.approx(TWO),
        ]
        assert replay(fed.state, 2)["server_round"] == 2


def test_votes_are_accounted_by_renyi_divergence_and_replay(tmp_path: Path, tiny_base: Path) -> None:
    folder = private_hub(
        tmp_path / "hub", tiny_base, privacy={"mechanism": "discrete_gaussian", "epsilon": 30.0}
    )
    with Federation.open(folder) as fed:
        rounds = PrivateRounds(fed)
        rounds.run()
        report = privacy.report(fed.config, fed.database)["central"]
        assert report["accountant"] == "rdp"
        assert report["epsilon_spent"] > ONE
        assert replay(fed.state, 1)["server_round"] == 1


LORA: dict[str, Any] = {"finetuning": "lora", "seed": 4, "lora": {"r": 2, "freeze_a": True}}


def task(base: BaseSpec, **lora: Any) -> TaskSpec:
    return TaskSpec(
        server="s0123456789abcdef",
        server_round=3,
        base_model="tiny",
        base_digest=base.digest,
        version_digest=base.digest,
        recipe=TrainingRecipe.model_validate({**LORA, "lora": {**LORA["lora"], **lora}}),
        max_update_bytes=1,
        deadline_seconds=1,
    )


def test_the_tensors_of_a_task_are_those_that_peft_trains(tiny_base: Path) -> None:
    for lora in ({}, {"target_modules": ["q_proj", "down_proj"]}):
        model = load_model(str(tiny_base)).model
        base = BaseSpec.of(model, "tiny")
        spec = task(base, **lora)
        adapted = add_lora(model, LoraSettings(**spec.recipe.lora.model_dump()), seed=7)
        factors = lora_factors(adapted)
        assert private_merge.trained_tensors(spec.recipe, base) == sorted(factors)
        recorded = {
            "mechanism": "gaussian",
            "noise_multiplier": 1.0,
            "clipping_norm": 1.0,
            "clipping": "whole",
            "adaptive_clipping": None,
        }
        frozen = private_merge.private_round(recorded, spec, base, bytes(32)).frozen_a
        assert frozen is not None
        for name, (a, _, _) in factors.items():
            assert torch.equal(frozen(name, a.shape[1]), a.to(torch.bfloat16))


def test_a_round_of_frozen_a_is_noised_on_b_and_who_sends_what_the_task_does_not_train_stays_out(
    tmp_path: Path, tiny_base: Path
) -> None:
    rounds = {"num_rounds": 5, "min_contributors": 2}
    codec = {"codec": "dense", "error_feedback": False, "factors": "float32"}
    folder = private_hub(tmp_path / "hub", tiny_base, recipe=LORA, codec=codec, rounds=rounds)
    with Federation.open(folder) as fed:
        private = PrivateRounds(fed)
        number = private.collect(send=False)
        current = fed.round_store.current()
        assert current is not None
        assert current.spec is not None
        head = fed.round_store.head()
        spec = BaseSpec(fed.base.model_name, head.digest, fed.base.shapes)
        trained = private_merge.trained_tensors(current.spec.recipe, fed.base)
        for name in NAMES:
            tensors = [*trained, "model.embed_tokens.weight"] if name == "cat" else trained
            seed = current.spec.recipe.seed + number
            factors = {}
            for tensor in tensors:
                rows, cols = fed.base.shapes[tensor]
                a = frozen_factor(seed, tensor.removesuffix(".weight"), 2, cols)
                factors[tensor] = (a, torch.full((rows, 2), 1e-3), 8.0)
            path = fed.folder / "staging" / f"{name}.gymdelta"
            lora_delta(factors, path, spec, policy=fed.config.codec)
            assert private.send(name, number, path).verdict == "admitted"
        assert private.finish(number).state == "committed"
        (rejected,) = [v for v in private.entries("verdict") if v["verdict"] == "rejected"]
        assert rejected["contributor"] == private.keys["cat"].contributor
        assert rejected["reason"] == "update-refused"
        with fed.database.reading() as tx:
            (why,) = tx.scalars(select(updates.c.reason).where(updates.c.verdict == "rejected"))
        assert "is not one that the task trains" in why
        recorded = private.entries("version")[0]["privacy"]
        assert recorded["coordinates"] == sum(2 * fed.base.shapes[name][0] for name in trained)
        assert len(private.entries("privacy")[0]["contributors"]) == 2
        with DeltaFile.open(fed.store.local_path(fed.round_store.soups()[0].sha256)) as soup:
            assert [name for name in soup.names if soup.tensor_norm(name)] == trained
        assert replay(fed.state, number)["updates"] == 2
