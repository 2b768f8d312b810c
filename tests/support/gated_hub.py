"""A hub's folder with a ``gate``, and what its start refuses of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_server.cli.checks_at_start import check_at_start
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation

from gym_fed.core.errors import GymError


def with_gate(folder: Path, base: Path | str, **gate: Any) -> Path:
    """A new hub on a base, with these settings of its gate."""
    init_hub(folder, HubChoices(str(base), "gated", "open"))
    path = folder / "gym-server.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "gate": gate}))
    return folder


def refusal(folder: Path) -> GymError:
    """What the checks at the start of a hub refuse."""
    with pytest.raises(GymError) as caught, Federation.open(folder) as fed:
        check_at_start(fed.state, fed.config, fed.recipes)
    return caught.value
