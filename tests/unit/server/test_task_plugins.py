"""What a hub requires of an installed package: the task names it, and a client without it refuses by that name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gym_client.agent.global_model import GlobalModel
from gym_client.agent.policy import Policy
from gym_client.agent.version_sum import VersionSum
from gym_client.agent.work import parse_task
from gym_client.cli.announced import announced
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import SoupReference, TaskSpec, TrainingRecipe
from gym_fed.config.schema.plugins import plugins_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.installed import install
from tests.support.variants import write_random_delta

HERE = "tests.support.more_training"
POINTS = {
    "gym_fed.algorithms": {"weighed_sft": f"{HERE}:WeighedSft", "needs_reports": f"{HERE}:NeedsReports"},
    "gym_fed.tuning": {"norms": f"{HERE}:NormsOnly"},
}
DIGEST = "sha256:" + "0" * 64


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ALGORITHMS, TUNING):
        monkeypatch.setattr(kind, "_types", dict(kind._types))
    install(monkeypatch, POINTS)


def task(**recipe: Any) -> TaskSpec:
    settings = TrainingRecipe(**recipe)
    return TaskSpec(
        server="s" + "0" * 16,
        server_round=1,
        base_model="gym-nano",
        base_digest=DIGEST,
        version_digest=DIGEST,
        recipe=settings,
        max_update_bytes=1,
        deadline_seconds=1,
        plugins=plugins_of(settings, CodecPolicy()),
    )


def mine() -> TaskSpec:
    return task(algorithm="weighed_sft", weighed_sft={"beta": 2}, finetuning="norms")


def test_a_round_of_a_packages_members_is_trained_with_the_sections_of_the_task(tmp_path: Path) -> None:
    spec = parse_task(mine().model_dump_json())
    assert [(p.kind, p.name, p.distribution, p.version) for p in spec.plugins] == [
        ("algorithm", "weighed_sft", "gym-more", "1.2"),
        ("tuning method", "norms", "gym-more", "1.2"),
    ]
    settings: Any = round_training(spec.recipe, 3, tmp_path)
    assert (settings.weighed_sft.beta, settings.norms.also, settings.seed) == (2.0, [], 3)
    assert not spec.recipe.sends_factors


def test_a_contributor_without_the_package_refuses_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = mine().model_dump_json()
    for kind in (ALGORITHMS, TUNING):
        monkeypatch.setattr(kind, "_types", {})
    install(monkeypatch, {})
    with pytest.raises(
        GymError, match=r"algorithm 'weighed_sft' of gym-more 1.2 .*which is not installed"
    ) as caught:
        parse_task(text)
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"algorithm": "trap"}},
        {"recipe": {"finetuning": "trap"}},
        {"codec": {"codec": "trap", "lora_rank": 4}},
        {"codec": {"codec": "trap", "group_size": 8}},
        {"codec": {"embeddings": "trap"}},
        {"codec": {"head": "trap-row"}},
        {"codec": {"small_tensors": "trap"}},
        {"codec": {"factors": "trap"}},
    ],
)
def test_a_member_that_a_hub_names_and_does_not_record_is_refused_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, Any]]
) -> None:
    trap = {"trap": "tests.unit.no_such_module:Trap"}  # the import would fail, with other words
    kinds = ("algorithms", "tuning", "codecs")
    install(monkeypatch, {f"gym_fed.{kind}": trap for kind in kinds})
    hubs_word = json.loads(task().model_dump_json())
    for key, values in changes.items():
        hubs_word[key] |= values
    said = (
        r" lists (algorithm|tuning method|codec) 'trap' without a package, "
        r"but the installed one is from gym-more 1\.2$"
    )
    with pytest.raises(GymError) as of_task:
        parse_task(json.dumps(hubs_word))
    with pytest.raises(GymError) as of_terms:
        announced(pb.StatusReply(recipe_json=json.dumps(hubs_word)))
    for caught, whose in ((of_task, "the task"), (of_terms, "the hub's recipe")):
        assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
        assert re.fullmatch(whose + said, caught.value.message)


def test_a_soup_in_a_codec_that_the_task_does_not_record_is_refused_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, tiny_base: Path, tmp_path: Path
) -> None:
    model = GlobalModel(str(tiny_base))
    soup = write_random_delta(model.model, tmp_path / "soup", lambda name, shape: ("dense", {}), seed=1)
    soup.write_bytes(soup.read_bytes().replace(b"dense", b"trap5"))
    install(monkeypatch, {"gym_fed.codecs": {"trap5": "tests.unit.no_such_module:Trap"}})
    spec = task().model_copy(
        update={
            "base_digest": model.base.digest,
            "soups": [SoupReference(sha256="0" * 64, size_bytes=1, version_digest=DIGEST, server_round=1)],
        }
    )
    with pytest.raises(GymError, match=r"the task lists codec 'trap5' without a package, but the") as caught:
        model.advance(spec, lambda sha256: soup, VersionSum(tmp_path / "versions"))
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "1.1"}, "but the installed one is from gym-more 1.2"),
        ({"digest": "0" * 64}, "different files"),
    ],
)
def test_another_version_or_other_files_are_refused(changes: dict[str, str], said: str) -> None:
    document = json.loads(mine().model_dump_json())
    document["plugins"][0] |= changes
    with pytest.raises(GymError, match=said):
        parse_task(json.dumps(document))


def test_plugins_that_are_no_list_of_plugins_are_refused_like_any_other_key() -> None:
    document = json.loads(mine().model_dump_json())
    for wrong in ({"a": 1}, [{"kind": "algorithm"}], [document["plugins"][0]] * 65):
        with pytest.raises(GymError, match="the task is invalid") as caught:
            parse_task(json.dumps({**document, "plugins": wrong}))
        assert caught.value.code is ErrorCode.POLICY_REFUSED


def test_what_a_hub_writes_into_keys_reaches_no_terminal_and_has_an_end() -> None:
    document = json.loads(mine().model_dump_json())
    document["plugins"][0] |= {f"\x1b[{number}m": 1 for number in range(1000)}
    with pytest.raises(
        GymError, match=r"the task is invalid: plugins\.0\.\\x1b\[0m: unknown key; "
    ) as caught:
        parse_task(json.dumps(document))
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) <= 2000


def test_a_task_of_our_own_members_is_written_as_it_always_was() -> None:
    document = json.loads(task(algorithm="dpo", finetuning="lora").model_dump_json())
    assert "plugins" not in document
    assert list(document)[-1] == "secure_aggregation"


def test_a_contributor_allows_a_packages_algorithm_only_by_name() -> None:
    spec = mine()
    with pytest.raises(GymError, match="weighed_sft"):
        Policy().check_recipe(spec.recipe, DIGEST)
    Policy(algorithms=["weighed_sft"], finetuning=["norms"]).check_recipe(spec.recipe, DIGEST)


@pytest.mark.parametrize(
    "recipe", [{"algorithm": "ppo"}, {"finetuning": "freeze"}, {"algorithm": "needs_reports"}]
)
def test_what_does_not_federate_cannot_be_asked_for(recipe: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be used for this key; use one of "):
        TrainingRecipe(**recipe)


def test_a_key_that_is_no_section_of_the_chosen_is_refused() -> None:
    document = json.loads(mine().model_dump_json())
    for key in ("command", "dpo", "seed_file"):
        with pytest.raises(GymError, match=key):
            parse_task(json.dumps({**document, "recipe": {**document["recipe"], key: {"path": "/etc"}}}))


def test_a_hub_knows_a_round_that_has_ended_without_the_packages_of_its_task(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_hub(tmp_path / "hub", HubChoices(str(tiny_base), "rounds", "open"))
    with Federation.open(tmp_path / "hub") as hub:
        number = hub.round_store.open_next().server_round
        assert hub.round_store.start_collecting(number, mine()).spec == mine()
        hub.round_store.abort(number, "nobody came")
        for kind in (ALGORITHMS, TUNING):
            monkeypatch.setattr(kind, "_types", {})
        install(monkeypatch, {})
        current = hub.round_store.current()
        assert current is not None
        assert (current.server_round, current.state) == (number, "aborted")
        with pytest.raises(GymError, match=r"'weighed_sft' of gym-more 1.2 .*which is not installed"):
            _ = current.spec
        assert hub.round_store.open_next().spec is None
