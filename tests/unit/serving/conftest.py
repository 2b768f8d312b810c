"""The tokenizer of gym-nano, a new one for each file of tests."""

from __future__ import annotations

from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer


@pytest.fixture(scope="module")
def nano_tokenizer() -> Any:
    return load_tokenizer("gym-nano")


@pytest.fixture(scope="module")
def tokenizer(nano_tokenizer: Any) -> Any:
    return nano_tokenizer
