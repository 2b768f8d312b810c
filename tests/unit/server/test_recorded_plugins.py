"""Records of plug-ins: found wherever a config names a member, checked against what is installed, and bounded."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_server.cli.main import app
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.strategy.tasks import plugins_of_round
from typer.testing import CliRunner

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.schema.plugins import (
    as_json,
    plugins_of,
    read_records,
    recorded_in,
    records,
    require_plugins,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import (
    AGGREGATORS,
    CODECS,
    CONTRIBUTIONS,
    METHODS,
    PRE_AGGREGATORS,
    SERVER_OPTIMIZERS,
)
from tests.support.installed import install
from tests.support.sources import parsed

ROOT = Path(__file__).parents[3]
NOT_RULES = {"median", "linear", "adam", "fisher", "improvement"}
"""Words that name other things too: a pruner of searches, schedules, optimisers, statistics, a way to pay royalties."""


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "gym_fed.aggregators": {"mine": "json:A", "mine+": "json:A", "ends": "module_that_exits:A"},
        "gym_fed.pre_aggregators": {"step": "json:B"},
    }
    install(monkeypatch, points)


def test_members_are_found_in_lists_and_sections_and_ours_are_left_out() -> None:
    recipe = SoupRecipe(aggregator="mine", pre_aggregators=["norm_cap", "step"])
    assert [(r.kind, r.name, r.distribution, r.version) for r in plugins_of(recipe)] == [
        ("aggregator", "mine", "gym-more", "1.2"),
        ("pre-aggregator", "step", "gym-more", "1.2"),
    ]
    assert plugins_of(SoupRecipe()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "9"}, "but the installed one is from gym-more 1.2"),
        ({"digest": "0" * 64}, "has different files"),
        ({"name": "other"}, "which is not installed"),
        ({"kind": "robot"}, "this release has no robot"),
        ({"name": "krum"}, "is gym-fed's own"),
    ],
)
def test_another_plug_in_than_the_recorded_one_is_refused_by_name(change: dict[str, str], said: str) -> None:
    record = plugins_of(SoupRecipe(aggregator="mine"))[0]
    require_plugins([record], "the task")
    with pytest.raises(GymError, match=said) as caught:
        require_plugins([record.model_copy(update=change)], "the task")
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_a_member_that_is_a_plug_in_only_here_is_refused() -> None:
    used = plugins_of(SoupRecipe(aggregator="mine"))
    with pytest.raises(GymError, match="lists aggregator 'mine' without a package, but"):
        require_plugins([], "the task", used)


@pytest.mark.parametrize(
    "wrong", [{"name": "a\u202eb"}, {"version": "1 2"}, {"digest": "x"}, {"path": "/etc"}]
)
def test_records_that_are_no_records_are_refused(wrong: dict[str, Any]) -> None:
    recorded = as_json(plugins_of(SoupRecipe(aggregator="mine")))[0]
    assert recorded_in(json.dumps({"plugins": [recorded], "more": 1}))
    assert recorded_in(json.dumps({"plugins": [{**recorded, **wrong}]})) == []
    for values in ([{**recorded, **wrong}], [recorded] * 65):
        with pytest.raises(GymError, match="plugins"):
            read_records(values, "the ledger")


def test_what_is_wrong_with_a_record_is_said_with_its_key() -> None:
    recorded = as_json(plugins_of(SoupRecipe(aggregator="mine")))[0]
    with pytest.raises(GymError, match=r"^the ledger: plugins\.0\.version: "):
        read_records([{**recorded, "version": "1 2"}], "the ledger")


def test_a_member_whose_name_no_record_takes_is_refused() -> None:
    with pytest.raises(GymError, match=r"'mine\+' of gym-more 1\.2 cannot be recorded") as caught:
        plugins_of(SoupRecipe(aggregator="mine+"))
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_a_module_that_ends_the_process_when_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(GymError, match=r"'ends' of gym-more 1\.2 cannot be imported"):
        AGGREGATORS.type_of("ends")


def test_no_rule_is_known_by_its_name_outside_its_file() -> None:
    kinds = (AGGREGATORS, PRE_AGGREGATORS, METHODS, SERVER_OPTIMIZERS, CONTRIBUTIONS)
    names = {name for kind in kinds for name in kind.own()} - NOT_RULES
    mentions = re.compile(f"[\"']({'|'.join(names)})[\"']")
    found = []
    for folder in ("gym_fed/soup", "gym_fed/config", "gym_fed/privacy", "gym_fed/cli", "server", "client"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not mentions.search(file.read_text(encoding="utf-8")):
                continue
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.Compare):
                    words = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                    found += [f"{file.relative_to(ROOT)}:{node.lineno}: {w}" for w in words & names]
    assert not found


@pytest.mark.parametrize("verb", ["replay", "rescore"])
def test_a_round_whose_plug_in_is_gone_is_refused_by_that_and_not_by_the_hubs_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_base: Path, verb: str
) -> None:
    hub = tmp_path / "hub"
    init_hub(hub, HubChoices(str(tiny_base), "rules", "open"))
    recorded = {"server_round": 3, "height": 1, "plugins": as_json(plugins_of(SoupRecipe(aggregator="mine")))}
    with Federation.open(hub) as fed, fed.database.transaction() as tx:
        fed.ledger.append(tx, "version", recorded)
    config = hub / "gym-server.yaml"
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**values, "soup": {"aggregator": "mine"}}))
    install(monkeypatch, {})
    error = CliRunner().invoke(app, ["ledger", verb, "3", "--dir", str(hub)]).exception
    assert isinstance(error, GymError)
    assert error.code is ErrorCode.MISSING_DEPENDENCY
    assert re.fullmatch(
        r"round 3 needs aggregator 'mine' of gym-more 1\.2 \(sha256 \w{12}\), which is not installed",
        error.message,
    )
    other = CliRunner().invoke(app, ["ledger", verb, "4", "--dir", str(hub)]).exception
    assert isinstance(other, GymError)
    assert other.code is ErrorCode.CONFIG_INVALID
    assert f"{config}:" in other.message


def test_a_round_records_the_codecs_of_soups_and_not_those_of_updates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_base: Path
) -> None:
    install(monkeypatch, {"gym_fed.codecs": {"mine": "json:A", "theirs": "json:B"}})
    init_hub(tmp_path / "hub", HubChoices(str(tiny_base), "rules", "open"))
    recorded = {
        "server_round": 1,
        "recipe": {"codec": {"codec": "dense", "head": "mine-row", "lora_rank": None}},
        "plugins": as_json(records([(CODECS, "mine"), (CODECS, "theirs")])),
    }
    with Federation.open(tmp_path / "hub") as fed:
        assert plugins_of_round(fed.config, fed.ledger, TrainingRecipe()) == []
        with fed.database.transaction() as tx:
            fed.ledger.append(tx, "version", recorded)
        assert [(r.kind, r.name) for r in plugins_of_round(fed.config, fed.ledger, TrainingRecipe())] == [
            ("codec", "mine")
        ]
