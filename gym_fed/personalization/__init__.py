"""Personal variants of one base model: created from a user's own data, served by name. Names are imported on first use.

Neighbours: imports config, data, delta, errors, evaluation, files, identity, kinds, lazy, modeling, models,
quantization, renamed, serving, text, training, version; imported by cli, webui.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.personalization.trainer import PersonalizedTrainer as PersonalizedTrainer

__all__, __getattr__ = lazy(__name__)
