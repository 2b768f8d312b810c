"""The newest global version of the hub that was joined, made of the base and the soups that this machine holds."""

from __future__ import annotations

import json
from typing import Any

from gym_client.agent.global_model import GlobalModel
from gym_client.hub.transfers import ObjectCache
from gym_client.identity.home import Home

from gym_fed.config.hub.task import TaskSpec
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode
from gym_fed.interop.row import RefusedWord

_NONE = RefusedWord(
    "no soup of a hub is on this machine; a contributor gets them with its tasks",
    (
        'trainer.apply_deltasoup({"ada": "ada.gymdelta", "ben": "ben.gymdelta"})',
        "gym-client join HUB --data my.jsonl",
    ),
)


def newest_version(config: TrainingConfig, home: Home | None = None) -> Any:
    """The model of the newest global version, of the newest task in the contributor's home.

    Args:
        config: Of the run that it is merged with; its ``model`` is the base.
        home: By default ``$GYM_HOME`` or ``~/.gym-fed``.

    Raises:
        GymError: ``NOT_FOUND`` without such a task; ``BASE_MISMATCH`` when its hub has another base.
    """
    home = home or Home.open()
    specs = [_spec(path.read_text(encoding="utf-8")) for path in home.tasks.glob("*/task.json")]
    with_soups = [spec for spec in specs if spec.soups]
    if not with_soups or config.model is None:
        raise _NONE.error("trainer.apply_deltasoup()", code=ErrorCode.NOT_FOUND)
    newest = max(with_soups, key=lambda spec: (spec.deadline_seconds, spec.server_round))
    version = GlobalModel(config.model)
    version.advance(newest, ObjectCache(home.objects).path)
    return version.model


def _spec(text: str) -> TaskSpec:
    return TaskSpec.model_validate(json.loads(text)["spec"])
