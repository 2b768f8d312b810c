"""YAML configs: what is refused, and that the complaint points at the right character."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.serving import ServingConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml, load_config, parse_overrides, validate
from gym_fed.config.yaml.strict import parse_config
from gym_fed.core.errors import ErrorCode, GymError


class Optimiser(StrictModel):
    lr: float = Field(default=1e-3, gt=0)
    betas: list[float] = Field(default=[0.9, 0.999])


class Trimmed(StrictModel):
    rule: Literal["trimmed"]
    share: float = Field(default=0.1, lt=0.5)


class Krum(StrictModel):
    rule: Literal["krum"]
    num_malicious_nodes: int


class Stage(StrictModel):
    name: str
    steps: int = 1


class Recipe(StrictModel):
    base_model: str
    optimiser: Optimiser = Optimiser()
    aggregator: Annotated[Trimmed | Krum, Field(discriminator="rule")] | None = None
    stages: list[Stage] = Field(default=[])
    named: dict[str, Stage] = Field(default={})
    seed: int | str = 0
    private: bool = False

    @model_validator(mode="after")
    def _private_needs_small_steps(self) -> Recipe:
        if self.private and self.optimiser.lr > 1:
            raise ValueError("private training wants lr <= 1")
        return self


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def _write(text: str) -> Path:
        file = tmp_path / "r.yaml"
        file.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return file

    return _write


def refusal(file: Path, *overrides: str) -> str:
    """What ``load_config`` says of a file that it must refuse, with the folder left out."""
    with pytest.raises(GymError) as caught:
        load_config(file, Recipe, overrides)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    return caught.value.message.replace(f"{file.parent}/", "")


def test_a_good_file_becomes_its_schema(write) -> None:
    recipe = load_config(write("base_model: m\noptimiser: {lr: 1e-4}\nstages: [{name: a}]\n"), Recipe)
    assert recipe == Recipe(base_model="m", optimiser=Optimiser(lr=1e-4), stages=[Stage(name="a")])


def test_an_unknown_key_is_placed_and_the_known_one_suggested(write) -> None:
    file = write("""
        base_model: m
        optimiser:
          lrr: 0.1
    """)
    assert refusal(file) == "r.yaml:3:3: optimiser.lrr: unknown key (did you mean 'lr'?)"


def test_an_unknown_key_like_no_other_lists_the_known_ones(write) -> None:
    assert refusal(write("base_model: m\noptimiser: {zzz: 1}\n")) == (
        "r.yaml:2:13: optimiser.zzz: unknown key (known: lr, betas)"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "base_model: m\nstages:\n- name: a\n  stepz: 2\n",
            "r.yaml:4:3: stages.0.stepz: unknown key (did you mean 'steps'?)",
        ),
        (
            "base_model: m\nnamed:\n  x: {nam: a, name: b}\n",
            "r.yaml:3:7: named.x.nam: unknown key (did you mean 'name'?)",
        ),
        (
            "base_model: m\naggregator:\n  rule: trimmed\n  shar: 0.2\n",
            "r.yaml:4:3: aggregator.shar: unknown key (did you mean 'share'?)",
        ),
    ],
)
def test_suggestions_reach_into_lists_mappings_and_unions(write, text: str, complaint: str) -> None:
    assert refusal(write(text)) == complaint


def test_a_missing_key_points_at_its_parent(write) -> None:
    file = write("""
        # a comment first
        optimiser:
          lr: 0.1
        stages:
          - steps: 3
    """)
    assert refusal(file).splitlines() == [
        "r.yaml:2:1: base_model: required, but missing",
        "r.yaml:5:5: stages.0.name: required, but missing",
    ]


def test_a_missing_key_of_a_union_member_does_not_name_the_union(write) -> None:
    file = write("base_model: m\naggregator:\n    rule: krum\n")
    assert refusal(file) == "r.yaml:2:1: aggregator.num_malicious_nodes: required, but missing"


def test_an_empty_file_misses_its_keys(write) -> None:
    assert refusal(write("# nothing yet\n")) == "r.yaml:1:1: base_model: required, but missing"


def test_a_wrong_type_quotes_the_value(write) -> None:
    file = write("""
        base_model: m
        optimiser:
          betas:
            - 0.9
            - soon
    """)
    complaint = refusal(file)
    assert complaint.startswith("r.yaml:5:7: optimiser.betas.1: ")
    assert complaint.endswith("(got 'soon')")


def test_a_value_out_of_range_is_refused_with_the_range(write) -> None:
    complaint = refusal(write("base_model: m\noptimiser: {lr: -1}\n"))
    assert complaint == "r.yaml:2:13: optimiser.lr: Input should be greater than 0 (got -1)"


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_what_is_not_finite_is_refused(write, value: str) -> None:
    assert "r.yaml:2:13: optimiser.lr: " in refusal(write(f"base_model: m\noptimiser: {{lr: {value}}}\n"))


def test_a_huge_value_is_quoted_in_part(write) -> None:
    complaint = refusal(write(f"base_model: m\nprivate: {'x' * 5000}\n"))
    assert "... (5,002 characters)" in complaint
    assert len(complaint) < 300


def test_a_scalar_union_is_complained_about_at_its_key(write) -> None:
    lines = refusal(write("base_model: m\nseed: 1.5\n")).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("r.yaml:2:1: seed: ") for line in lines)


def test_a_rule_across_keys_is_reported_with_its_own_message(write) -> None:
    file = write("base_model: m\nprivate: true\noptimiser: {lr: 2}\n")
    assert refusal(file) == "r.yaml:1:1: (file): private training wants lr <= 1"


def test_every_problem_is_listed(write) -> None:
    file = write("base_mode: m\noptimiser: {lr: 0}\nstages: 3\n")
    assert [line.split(": ")[0] for line in refusal(file).splitlines()] == [
        "r.yaml:1:1",
        "r.yaml:2:13",
        "r.yaml:3:1",
        "r.yaml:1:1",
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("base_model: m\nseed: 1\nbase_model: n\n", "r.yaml:3:1: base_model"),
        ("base_model: m\noptimiser: {lr: 1, lr: 2}\n", "r.yaml:2:20: optimiser.lr"),
        ("base_model: m\nstages:\n- name: a\n  name: b\n", "r.yaml:4:3: stages.0.name"),
    ],
)
def test_a_key_given_twice_is_refused_at_its_second_place(write, text: str, place: str) -> None:
    assert refusal(write(text)) == f"{place}: given twice"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("base_model: [m\n", "r.yaml:2:1: not valid YAML"),
        ("base_model: m\n  seed: 1\n", "r.yaml:2:7: not valid YAML"),
        ("base_model: m\n\tseed: 1\n", "r.yaml:2:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1: not valid YAML"),
        ("base_model: *nobody\n", "r.yaml:1:13: not valid YAML"),
        ("base_model: m\nseed: !!python/name:os.system\n", "r.yaml:2:7: not valid YAML"),
        (
            "base_model: m\nseed: 2026-13-45\n",
            "r.yaml:2:7: not valid YAML: '2026-13-45' is not a valid timestamp",
        ),
        ("base_model: m\nseed: !!int soon\n", "r.yaml:2:7: not valid YAML: 'soon' is not a valid int"),
        ("base_model: m\nprivate: !!bool soon\n", "r.yaml:2:10: not valid YAML: 'soon' is not a valid bool"),
        ("base_model: m\nseed: \x07\n", "r.yaml:2:7: not valid YAML: character U+0007"),
        ("- base_model\n", "r.yaml:1:1: expected a mapping"),
        ("\njust words\n", "r.yaml:1:1: expected a mapping"),
        ("base_model: m\n? [a, b]\n: 1\n", "r.yaml:2:3: (file): YAML reads this key as seq"),
        ("base_model: m\noptimiser:\n  <<: {lr: 1}\n", "r.yaml:3:3: optimiser: merge keys are not supported"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_place(write, text: str, place: str) -> None:
    assert refusal(write(text)).startswith(place)


def test_a_key_that_is_no_text_is_refused(write) -> None:
    assert refusal(write("base_model: m\n7: seven\n")) == "r.yaml:2:1: 7: Keys should be strings (got 7)"
    assert refusal(write("base_model: m\nnamed:\n  no: {name: Norway}\n")) == (
        "r.yaml:3:3: named: YAML reads this key as bool, not as text; put it in quotes"
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(GymError, match=r"nowhere\.yaml") as caught:
        load_config(tmp_path / "nowhere.yaml", Recipe)
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    with pytest.raises(GymError) as caught:
        load_config(tmp_path, Recipe)
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"base_model: caf\xe9\n")
    assert refusal(file) == "r.yaml: not UTF-8 at byte 15"


def test_a_byte_order_mark_moves_no_column(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"\xef\xbb\xbfbase_model: m\r\nseeed: 1\r\n")
    assert refusal(file) == "r.yaml:2:1: seeed: unknown key (did you mean 'seed'?)"


def test_more_than_a_mebibyte_is_refused_and_exactly_one_is_read(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    text = b"base_model: m\n#"
    file.write_bytes(text.ljust(1 << 20, b"x"))
    assert load_config(file, Recipe).base_model == "m"
    file.write_bytes(text.ljust((1 << 20) + 1, b"x"))
    assert refusal(file) == "r.yaml: larger than 1048576 bytes"


def test_deep_nesting_is_refused(write) -> None:
    assert "nested more than 64 deep" in refusal(write("base_model: " + "[" * 100 + "]" * 100))
    assert "nested too deeply" in refusal(write("base_model: " + "[" * 50_000))


def test_aliases_that_multiply_are_refused(write) -> None:
    laughs = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    laughs += [f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "aliases expanded" in refusal(write("\n".join(laughs)))
    assert "nested more than 64 deep" in refusal(write("a: &a [*a]\n"))


def test_a_setting_wins_over_the_file(write) -> None:
    file = write("base_model: m\noptimiser: {lr: 0.1, betas: [0.8, 0.9]}\nstages: [{name: a}, {name: b}]\n")
    recipe = load_config(
        file,
        Recipe,
        [
            "optimiser.lr=0.5",
            "optimiser.betas.1=0.99",
            "stages.1.steps=7",
            "named.x={name: c}",
            "base_model=n",
        ],
    )
    assert recipe.base_model == "n"
    assert recipe.optimiser == Optimiser(lr=0.5, betas=[0.8, 0.99])
    assert recipe.stages[1] == Stage(name="b", steps=7)
    assert recipe.named["x"] == Stage(name="c")


def test_a_setting_may_replace_a_list_or_make_the_mappings_on_its_way(write) -> None:
    recipe = load_config(
        write("base_model: m\noptimiser:\n"),
        Recipe,
        ["optimiser.lr=2", "named.0.name=zero", "stages=[{name: z}]"],
    )
    assert (recipe.optimiser.lr, recipe.named["0"].name, recipe.stages[0].name) == (2.0, "zero", "z")


def test_of_two_settings_the_later_wins(write) -> None:
    assert load_config(write("base_model: m\n"), Recipe, ["seed=1", "seed=2"]).seed == 2


def test_a_setting_changes_one_use_of_an_alias_only(write) -> None:
    file = write("base_model: m\nstages:\n- &s {name: a}\n- *s\n")
    recipe = load_config(file, Recipe, ["stages.0.name=z"])
    assert [stage.name for stage in recipe.stages] == ["z", "a"]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("optimiser.lr=-1", "--set: optimiser.lr: Input should be greater than 0 (got -1)"),
        ("optimiser={lrr: 1}", "--set: optimiser.lrr: unknown key (did you mean 'lr'?)"),
        ("stages.5.name=x", "--set stages.5.name: no item 5 in a list of 1"),
        ("stages.first.name=x", "--set stages.first.name: no item 'first' in a list of 1"),
        ("stages.1={name: x}", "--set stages.1: no item 1 in a list of 1"),
        ("base_model.size=3", "--set base_model.size: base_model is a value"),
        ("seed=[1", "--set 'seed=[1': the value is not YAML"),
        ("seed=2026-13-45", "--set 'seed=2026-13-45': the value is not YAML"),
    ],
)
def test_a_bad_setting_is_named_as_one(write, setting: str, complaint: str) -> None:
    assert refusal(write("base_model: m\nstages: [{name: a}]\n"), setting) == complaint


@pytest.mark.parametrize("setting", ["seed", "=3", "a..b=3", ".a=3"])
def test_a_setting_without_its_form_is_a_usage_error(setting: str) -> None:
    with pytest.raises(GymError, match="not of the form") as caught:
        parse_overrides([setting])
    assert caught.value.code is ErrorCode.USAGE


def test_settings_are_parsed_as_yaml_once_split_at_the_first_equals_sign() -> None:
    assert parse_overrides(["a.0.b=[1, x]", "c=d=e", "e="]) == [
        (("a", 0, "b"), [1, "x"]),
        (("c",), "d=e"),
        (("e",), None),
    ]


def test_plain_values_are_validated_without_a_file() -> None:
    with pytest.raises(GymError, match=r"^the request:1:1: base_model: required") as caught:
        validate({}, Recipe, "the request")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
recipes = st.builds(
    Recipe,
    base_model=text,
    optimiser=st.builds(Optimiser, lr=st.floats(min_value=1e-30, max_value=1e30)),
    aggregator=st.none() | st.builds(Trimmed, rule=st.just("trimmed"), share=st.floats(0, 0.49)),
    stages=st.lists(st.builds(Stage, name=text, steps=st.integers()), max_size=3),
    named=st.dictionaries(text, st.builds(Stage, name=text), max_size=2),
    seed=st.integers() | text,
)


@settings(max_examples=60)
@given(recipe=recipes)
def test_a_dumped_config_is_read_back_equal(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("dump") / "r.yaml"
    file.write_text(dump_yaml(recipe), encoding="utf-8")
    assert load_config(file, Recipe) == recipe


@settings(max_examples=150)
@given(noise=st.text(max_size=60) | st.text("[]{}&*!|>%@:,-# \n\t'\"ab01<", max_size=40))
def test_no_text_makes_the_loader_fail_otherwise_than_by_refusing(
    noise: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("noise") / "r.yaml"
    file.write_bytes(noise.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(GymError) as caught:
        load_config(file, Recipe)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_the_learning_rate_falls_with_every_committed_round() -> None:
    from gym_fed.config.hub.server import ServerConfig

    config = ServerConfig.model_validate(
        {"rounds": {"learning_rate_decay": 0.5}, "recipe": {"learning_rate": 8e-3, "max_steps": 7}}
    )
    assert [config.recipe_at(height).learning_rate for height in range(4)] == [8e-3, 4e-3, 2e-3, 1e-3]
    assert config.recipe_at(3).max_steps == 7
    assert ServerConfig().recipe_at(9) == ServerConfig().recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": {"finetuning": "lora"}, "codec": {"distill_steps": 5}}, "full deltas"),
        ({"soup": {"codec": {"distill_steps": 5}}}, "no contributor's text"),
        ({"codec": {"distill_bits": True}}, "distill_steps"),
        ({"codec": {"codec": "dense", "distill_steps": 5}}, "scales, which .dense. does not have"),
    ],
)
def test_distillation_that_could_do_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    from gym_fed.config.hub.server import ServerConfig

    with pytest.raises(ValueError, match=message):
        ServerConfig.model_validate(values)


HUB = """\
name: a
admission:
  norm_ratio: 4.0
gate:
  max_loss_increase: 0.1
soup: {aggregator: krum, num_malicious_nodes: 0}
rewards: {similarity_threshold: null, stale_threshold: null, together_threshold: null}
privacy: {epsilon: 3.0}
"""


def test_a_combination_that_is_refused_is_a_line_for_each_reason_at_the_key_or_its_section(
    tmp_path: Path,
) -> None:
    from gym_fed.config.hub.server import ServerConfig

    file = tmp_path / "hub.yaml"
    file.write_text(HUB)
    with pytest.raises(GymError) as caught:
        load_config(file, ServerConfig, ["soup.max_norm=1.0"])
    lines = caught.value.message.splitlines()
    starts = [
        f"{file}:3:3: privacy: admission.norm_ratio rejects",
        f"{file}:4:1: privacy: gate.screen_updates rejects",  # not in the file: its section
        f"{file}:7:1: privacy: rewards.min_norm_ratio compares",
        f"{file}:6:8: privacy: soup.aggregator 'krum': the effect",
        "--set: privacy: soup.max_norm has no effect, since privacy.clipping_norm clips updates; remove it",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    file.write_text(
        "name: a\nrecipe: {finetuning: lora}\ncodec:\n  distill_steps: 5\nrewards:\n  score: shapley\n"
    )
    with pytest.raises(GymError, match=f"{re.escape(str(file))}:6:3: rewards.score 'shapley' is measured"):
        load_config(file, ServerConfig)
    with pytest.raises(GymError, match=f"{re.escape(str(file))}:4:3: codec.distill_steps is for full deltas"):
        load_config(file, ServerConfig, ["rewards.score=participation"])
    file.write_text("name: a\n\nsecure_aggregation: {threshold: 3}\n")
    with pytest.raises(GymError) as caught:
        load_config(file, ServerConfig)
    assert f"{file}:3:1: secure_aggregation.step_norm is missing" in caught.value.message
    assert (
        f"{file}:3:1: secure_aggregation: gate.screen_updates tests" in caught.value.message
    )  # no section: the cause


@pytest.mark.parametrize("section", ["privacy", "secure_aggregation"])
def test_the_template_of_a_hub_names_every_key_that_a_promise_wants(tmp_path: Path, section: str) -> None:
    import yaml
    from gym_server.cli.setup import HubChoices

    from gym_fed.config.hub.credits import RewardsConfig
    from gym_fed.config.hub.server import ServerConfig

    text = HubChoices(name="a").config_text()
    assert ServerConfig.model_validate(yaml.safe_load(text)).rewards == RewardsConfig()
    head, _, rest = text.partition(f"# {section}:\n")
    lines = rest.splitlines()
    end = next((n for n, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    own = [line.removeprefix("# ") for line in lines[:end]]
    file = tmp_path / "hub.yaml"
    file.write_text("\n".join([f"{head}{section}:", *own, *lines[end:]]))
    wanted = (
        "admission.norm_ratio gate.screen_updates rewards.similarity_threshold rewards.together_threshold"
    )
    settings = [f"{key}=null" for key in (*wanted.split(), "rewards.stale_threshold")]
    settings[1] = "gate.screen_updates=false"
    settings += ["rewards.min_norm_ratio=0", "soup.aggregator=mean", "soup.num_malicious_nodes=0"]
    assert getattr(load_config(file, ServerConfig, settings), section) is not None
    comment = text.partition("# Differential privacy")[2].partition(":\n")[0]
    with pytest.raises(GymError) as caught:
        load_config(file, ServerConfig)
    for line in caught.value.message.splitlines():
        key = line.split(f"{section}: ")[1].split()[0]
        assert key.rpartition(".")[2] in comment + head, key


@pytest.mark.parametrize(("base", "finetuning"), [("gym-nano", "full"), ("nobody/absent", "lora")])
def test_the_template_of_a_hub_takes_an_absent_base_for_a_large_one(base: str, finetuning: str) -> None:
    import yaml
    from gym_server.cli.setup import HubChoices

    recipe = yaml.safe_load(HubChoices(base_model=base).config_text())["recipe"]
    assert recipe["finetuning"] == finetuning


def test_words_that_yaml_reads_as_truth_are_words_where_a_key_takes_words(write) -> None:  # type: ignore[no-untyped-def]
    class Choices(StrictModel):
        precision: Literal["no", "bf16"] | None = None
        switch: Literal["on", "off"] = "off"
        either: Literal["warn", "no"] | bool = True
        plain: bool = True

    said = load_config(write("precision: no\nswitch: on\neither: no\nplain: no\n"), Choices)
    assert said == Choices(precision="no", switch="on", either=False, plain=False)
    with pytest.raises(GymError, match=r"1:1: precision: .*\(got True\)"):
        load_config(write("precision: yes\n"), Choices)


def test_mixed_precision_no_is_no(write) -> None:  # type: ignore[no-untyped-def]
    from gym_fed.config.train.training import TrainingConfig

    assert load_config(write("mixed_precision: no\n"), TrainingConfig).mixed_precision == "no"
    assert load_config(write("{}\n"), TrainingConfig, ["mixed_precision=no"]).mixed_precision == "no"
    with pytest.raises(GymError, match="mixed_precision"):
        load_config(write("mixed_precision: yes\n"), TrainingConfig)


@pytest.mark.parametrize(
    "number", ["1:" * 90_000 + "1", "9" * 5000, "0b" + "1" * 90_000, "1:" * 90_000 + "1.5"]
)
def test_a_number_of_many_digits_is_refused_at_once(number: str) -> None:
    with pytest.raises(GymError) as refused:
        parse_config(Path("run.yaml"), f"a: {number}\n")
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    assert "run.yaml:1:4" in refused.value.message
    assert "a number of" in refused.value.message  # refused before YAML reads its digits


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TrainingConfig, "model: gym-nano\noutput_dir: s3://bucket/run\n"),
        (ServingConfig, "base: gym-nano\nusage_log: s3://bucket/run\n"),
    ],
)
def test_a_url_for_a_local_folder_is_refused_by_its_key(schema: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(
        GymError, match=r"config\.yaml:2:\d+: \w+: 's3://bucket/run' is a URL, but this must be a local"
    ):
        load_config(tmp_path / "config.yaml", schema)
