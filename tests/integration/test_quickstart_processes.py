"""The quickstart's processes: a federation whose merge learned, and a variant behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gym_fed import quickstart
from tests.support.wait import SECONDS


@pytest.mark.slow  # a hub and two contributors as processes, half a minute
def test_a_federation_lowers_the_held_out_loss_and_leaves_a_model(tmp_path: Path) -> None:
    found = quickstart.federate(2, 1, tmp_path / "federation", max_steps=15)
    assert len(found.losses) == 2
    assert found.losses[1] < found.losses[0] - 0.5
    assert found.credits.keys() == {"ada", "ben"}
    assert all(credit > 0 for credit in found.credits.values())
    assert 0 <= quickstart.evaluate_model(found.model, "shout", num_examples=4)["exact_match"] <= 1


@pytest.mark.slow  # trains a variant and starts a server, half a minute
def test_a_variant_is_made_once_and_served(tmp_path: Path) -> None:
    for _ in range(2):
        with quickstart.serve_variant(store=tmp_path / "variants", max_steps=4) as served:
            assert served.ask("copy: abc", max_tokens=4)
            models = httpx.get(f"{served.url}/models", timeout=SECONDS).json()["data"]
            assert served.model in [model["id"] for model in models]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/models", timeout=SECONDS)
