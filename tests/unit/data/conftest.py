"""The tokenizer of gym-nano."""

from __future__ import annotations

from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("gym-nano")
