"""What docs/privacy.md says of configs is what the configs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.hub.server import ServerConfig
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from tests.support.private_configs import NOTHING_COMPARED

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "privacy.md").read_text()

OPEN: dict[str, Any] = {
    "rounds": {"min_contributors": 5},
    "soup": {"aggregator": "mean"},
    **NOTHING_COMPARED,
}
VOTES = {"mechanism": "discrete_gaussian", "epsilon": 5.0}
COLUMNS: dict[str, dict[str, Any]] = {
    "central, gaussian": {"privacy": {"epsilon": 5.0}},
    "central, votes": {"privacy": VOTES},
    "local": {"recipe": {"privacy": {}}},
    "secure aggregation": {"secure_aggregation": {"threshold": 3, "step_norm": 1.0}},
}
SCORES = {"rewards": {"score": "estimate"}, "gate": {"heldout": "task:copy", "screen_updates": False}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "local": [{"recipe": {"privacy": {}}}],
    "secure aggregation": [{"secure_aggregation": {"threshold": 3}}],
    "aggregator mean": [{}],
    "aggregator root_gate, with root data": [
        {"soup": {"aggregator": "root_gate"}, "root": {"data": "root.jsonl"}}
    ],
    "aggregator trimmed_mean, median": [{"soup": {"aggregator": a}} for a in ("trimmed_mean", "median")],
    "aggregator majority_vote": [{"soup": {"aggregator": "majority_vote"}}],
    "aggregator byzantine_robust, krum and others": [
        {"soup": {"aggregator": a}} for a in ("byzantine_robust", "krum", "bulyan", "geometric_median")
    ],
    "LoRA": [{"recipe": {"finetuning": "lora"}}],
    "LoRA with a frozen A": [{"recipe": {"finetuning": "lora", "lora": {"freeze_a": True}}}],
    "the gate on the soup": [{"gate": {"heldout": "task:copy", "screen_updates": False}}],
    "norm_ratio, screen_updates": [
        {"admission": {"norm_ratio": 4.0}},
        {"gate": {"screen_updates": True}},
    ],
    "contribution scores": [SCORES],
    "credits for taking part": [{"rewards": {"score": "participation"}}],
}


def table(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading of the page."""
    part = PAGE.split(f"## {heading}\n")[1]
    lines = [line for line in re.split(r"\n## ", part)[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def together(*parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in (OPEN, *parts):
        for section, values in part.items():
            found[section] = {**found.get(section, {}), **values}
    if "privacy" in found and "secure_aggregation" in found:
        found["secure_aggregation"].pop("step_norm", None)
    elif "secure_aggregation" in found:
        found["secure_aggregation"].setdefault("step_norm", 1.0)
    return found


def test_what_can_be_had_together_is_what_the_configs_take() -> None:
    head, *rows = table("What can be combined")
    assert head[1:] == list(COLUMNS)
    assert [row[0] for row in rows] == list(ROWS)
    for name, *cells in rows:
        for column, said in zip(COLUMNS, cells, strict=True):
            for chosen in ROWS[name]:
                config = together(COLUMNS[column], chosen)
                if said == "yes":
                    ServerConfig.model_validate(config)
                else:
                    with pytest.raises(ValueError, match=r"privacy|secure_aggregation"):
                        ServerConfig.model_validate(config)


def test_the_example_config_is_one_and_its_budget_lasts_for_its_rounds() -> None:
    (text,) = re.findall(r"```yaml\n# gym-server.yaml\n(.*?)```", PAGE, re.DOTALL)
    config = ServerConfig.model_validate(yaml.safe_load(text))
    assert config.privacy is not None
    event = NoiseEvent(
        mechanism=config.privacy.mechanism,
        noise_multiplier=config.privacy.noise_multiplier,
        count=config.rounds.num_rounds,
    )
    assert epsilon([event], config.privacy.target_delta) <= config.privacy.epsilon


@pytest.mark.parametrize(
    "multiplier",
    ["5", *(pytest.param(m, marks=pytest.mark.slow) for m in ("1", "2", "10"))],
)
def test_the_epsilons_of_the_page_are_the_accountants(multiplier: str) -> None:
    (row,) = [row for row in table("Central") if row[0] == multiplier]
    for mechanism, cells in (("gaussian", row[1:4]), ("discrete_gaussian", row[4:])):
        for count, cell in zip((1, 10, 50), cells, strict=True):
            event = NoiseEvent.model_validate(
                {"mechanism": mechanism, "noise_multiplier": float(multiplier), "count": count}
            )
            assert epsilon([event], 1e-5) == pytest.approx(float(cell), abs=0.0051)
