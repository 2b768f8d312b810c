"""Personal variants of one base model, trained on a user's own data and served by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.personalization.trainer import PersonalizedTrainer as PersonalizedTrainer

__all__, __getattr__ = lazy(__name__)
