"""`gym-client join --accept NAME`: a question in JSON says by which name it is accepted, and no other is."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from gym_client.cli import terms_in_words
from gym_client.cli.offer import Offer
from gym_client.cli.terminal import TerminalConsent

from gym_fed.core.errors import ErrorCode, GymError


def terms(**changes: Any) -> Any:
    found = {"server": "a hub", "update_bytes": 10, **changes}
    return SimpleNamespace(to_dict=lambda: found, fixed_terms=lambda: found)


@pytest.fixture(autouse=True)
def one_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms_in_words, "offer_lines", lambda offer: [("data", "rows \x1b[31m")])


def test_terms_are_accepted_by_name_and_changed_ones_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GymError) as refused:
        TerminalConsent(False, True).offer(terms())
    assert refused.value.code is ErrorCode.USAGE
    shown = json.loads(capsys.readouterr().out)
    assert shown["event"] == "offer"
    assert "\x1b" not in shown["lines"][0][1]
    again = TerminalConsent(False, True, accepted=[shown["accept"]])
    assert again.offer(terms())
    with pytest.raises(GymError):
        again.offer(terms(update_bytes=11))
    with pytest.raises(GymError):
        again.local_copy("base")
    assert again.accepts_offer(terms())
    assert not again.accepts_offer(terms(update_bytes=11))


def accepted(offer: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(GymError):
        TerminalConsent(False, True).offer(offer)
    name: str = json.loads(capsys.readouterr().out)["accept"]
    return name


def test_a_round_that_ends_meanwhile_does_not_ask_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def offer(spent: float = 1.0, rate: float = 9.5e-4, budget: float = 8.0, **changes: Any) -> Offer:
        central = {
            "epsilon": budget,
            "epsilon_spent": spent,
            "adaptive_clipping": True,
            "clipping_norm": spent,
        }
        fixed: dict[str, Any] = {name: name for name in Offer.__dataclass_fields__}
        fixed |= {"recipe": {"learning_rate": rate}, "privacy": {"central": central}}
        fixed |= {"rounds": 6, "join_download_bytes": 13_000_000, "round_download_bytes": 70_000}
        return Offer(**{**fixed, **changes})

    yes = TerminalConsent(False, True, accepted=[accepted(offer(), capsys)])
    assert yes.offer(offer(rounds=5, join_download_bytes=15_200_000, round_download_bytes=90_000))
    assert yes.offer(offer(spent=1.5, rate=9e-4))
    for change in (
        {"join_download_bytes": 2**30},
        {"round_download_bytes": 2**24},
        {"rounds": 1000},
        {"rounds": None},
        {"rate": 0.1},
        {"budget": 9.0},
        {"recipe": {"learning_rate": 9.5e-4, "max_steps": 9}},
        {"update_bytes": 2**20},
    ):
        with pytest.raises(GymError):
            yes.offer(offer(**change))
