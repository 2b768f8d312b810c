"""A coordinator changes the recipe while rounds go on: checked, in the ledger, and from the next round on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_server.cli.main import app
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rounds.recipes import changes_between, recipe_digest
from gym_server.strategy.tasks import new_task
from typer.testing import CliRunner

from gym_fed.core.errors import ErrorCode, GymError


class Hub:
    """A folder, and the commands on it."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        init_hub(folder, HubChoices(str(base), "steered", "open"))
        self.configure("recipe", max_steps=50, max_length=64)

    def configure(self, section: str, **changes: Any) -> None:
        path = self.folder / "gym-server.yaml"
        values = yaml.safe_load(path.read_text())
        values[section] = {**values.get(section, {}), **changes}
        path.write_text(yaml.safe_dump(values))

    def run(self, *words: str, as_json: bool = True) -> Any:
        done = CliRunner().invoke(app, [*words, "--dir", str(self.folder), *(["--json"] if as_json else [])])
        if done.exit_code:
            assert isinstance(done.exception, GymError), done.output
            raise done.exception
        return json.loads(done.stdout) if as_json else done.stdout

    def opened(self, *overrides: str) -> Federation:
        return Federation.open(self.folder, overrides)


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Hub:
    return Hub(tmp_path / "hub", tiny_base)


def test_what_is_set_holds_above_the_file_and_the_command_line_and_is_shown_as_such(hub: Hub) -> None:
    before = hub.run("recipe", "show")["digest"]
    entry = hub.run("recipe", "set", "recipe.max_steps=40", "codec.codec=int4", "--reason", "it is slow")
    assert entry["changes"]["recipe.max_steps"] == {"before": 50, "after": 40}
    assert (entry["reason"], entry["before"]) == ("it is slow", before)
    found = hub.run("recipe", "show")
    assert found["digest"] == entry["after"] != before
    assert found["overridden"] == {"codec.codec": "bitdelta", "recipe.max_steps": 50}
    lines = hub.run("recipe", "show", as_json=False)
    assert "recipe.max_steps: 40  (set by gym-server recipe set; gym-server.yaml has 50)" in lines.replace(
        "\n", " "
    )
    with hub.opened("recipe.max_steps=7") as fed:
        assert (fed.config.recipe.max_steps, fed.config.codec.codec) == (40, "int4")
        assert fed.ledger.verify()["entries"] == 1


def test_a_value_of_the_file_follows_the_file_again(hub: Hub) -> None:
    hub.run("recipe", "set", "recipe.max_steps=40", "recipe.seed=3")
    hub.run("recipe", "set", "recipe.max_steps=50")
    assert hub.run("recipe", "show")["settings"] == {"recipe.seed": "3"}
    hub.configure("recipe", max_steps=60)
    assert hub.run("recipe", "show")["values"]["recipe.max_steps"] == 60


def test_a_section_that_is_set_ends_what_was_set_inside_it(hub: Hub) -> None:
    hub.run("recipe", "set", "recipe.lora.r=4")
    hub.run("recipe", "set", "recipe.lora={lora_alpha: 32}")
    found = hub.run("recipe", "show")
    assert (found["values"]["recipe.lora.r"], found["values"]["recipe.lora.lora_alpha"]) == (8, 32)


def test_what_the_config_refuses_is_refused(hub: Hub) -> None:
    usage, invalid = ErrorCode.USAGE, ErrorCode.CONFIG_INVALID
    for words, code, said in (
        (["recipe.max_step=4"], invalid, "did you mean 'max_steps'"),
        (["recipe.max_steps=0"], invalid, "--set: recipe.max_steps: "),
        (["codec.codec=as-merged"], invalid, "not a product of factors"),
        (["codec.codec=lattice"], invalid, "only for soups"),
        (["rounds.num_rounds=4"], usage, "not of the form recipe.key=value"),
        (["recipe=4"], usage, "not of the form"),
        (["recipe.max_steps"], usage, "not of the form"),
        (["recipe.max_steps=50"], usage, "these settings do not change the recipe"),
        (["recipe.seed=1", "--reason", "a\nb"], usage, "not printable"),
    ):
        with pytest.raises(GymError) as refused:
            hub.run("recipe", "set", *words)
        assert refused.value.code is code
        assert said in str(refused.value)
    assert hub.run("recipe", "show")["settings"] == {}


def test_a_sparse_codec_is_refused_with_a_rule_on_coordinates_and_taken_with_one_on_updates(hub: Hub) -> None:
    hub.configure("soup", aggregator="median", num_malicious_nodes=0)
    with pytest.raises(
        GymError, match=r"'median' decides coordinate by coordinate.*'sparse_sign'"
    ) as refused:
        hub.run("recipe", "set", "codec.codec=sparse_sign")
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    hub.configure("soup", aggregator="mean", num_malicious_nodes=0)
    hub.run("recipe", "set", "codec.codec=sparse_sign")
    assert hub.run("recipe", "show")["values"]["codec.codec"] == "sparse_sign"


def test_what_the_hub_could_not_start_with_is_refused(hub: Hub) -> None:
    row = {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "ann"}]}
    (hub.folder / "root.jsonl").write_text(json.dumps(row) + "\n")
    hub.configure("root", data="root.jsonl")
    hub.configure("soup", aggregator="fltrust", num_malicious_nodes=1)
    with pytest.raises(GymError, match="preference rows are needed"):
        hub.run("recipe", "set", "recipe.algorithm=dpo")
    assert hub.run("recipe", "show")["settings"] == {}


def test_a_running_hub_takes_it_over_between_two_rounds_and_no_other_change_of_the_file(hub: Hub) -> None:
    with hub.opened() as fed:
        hub.configure("rounds", min_contributors=9)
        hub.run("recipe", "set", "recipe.max_steps=40")
        assert new_task(fed.state, fed.config, fed.max_update_bytes, 1).recipe.max_steps == 50
        fed.live_config.follow()
        assert new_task(fed.state, fed.config, fed.max_update_bytes, 2).recipe.max_steps == 40
        assert fed.config.rounds.min_contributors != 9


def test_two_commands_at_once_do_not_undo_each_other(hub: Hub) -> None:
    with hub.opened() as fed:
        known, after = fed.recipes.settings(), fed.source.config({"recipe.seed": "2"})
        assert list(changes_between(fed.config, after)) == ["recipe.seed"]
        hub.run("recipe", "set", "recipe.max_steps=40")
        with pytest.raises(GymError) as refused:
            fed.recipes.record(known, {"recipe.seed": "2"}, fed.config, after)
        assert refused.value.code is ErrorCode.BUSY
        assert recipe_digest(after) != recipe_digest(fed.config)


def test_a_file_that_no_longer_fits_what_was_set_is_refused_with_what_was_set(hub: Hub) -> None:
    hub.run("recipe", "set", "recipe.finetuning=lora")
    hub.configure("codec", distill_steps=5)
    with pytest.raises(GymError) as refused:
        hub.opened()
    assert "with gym-server recipe set: recipe.finetuning=lora" in str(refused.value)
