"""Log to Weights & Biases. Offline by default: `wandb sync RUN/wandb/offline-run-*` uploads it later."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.tracking.trackers.base import RunInfo, Tracker


class WandB(Tracker):
    """One run; a resumed one keeps its id. Code, machine details and console output are not recorded."""

    package = "wandb"

    def open(self, run: RunInfo) -> None:
        if run.online:
            _require_no_settings_here()

        import wandb

        self._wandb: Any = wandb
        mode: Any = os.environ.get("WANDB_MODE", "online")  # may turn the network off, never on
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            tags=list(run.tags),
            id=hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16],
            resume="allow" if run.online else None,
            dir=str(run.folder),
            mode=(mode if mode in ("offline", "disabled") else "online") if run.online else "offline",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_artifacts(self, paths: Sequence[Path]) -> None:
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            else:
                artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def _require_no_settings_here() -> None:
    """Refuse settings of wandb in the working folder, whose ``base_url`` would receive the API key.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    for file in (Path.cwd() / name / "settings" for name in ("wandb", ".wandb")):
        if os.path.lexists(file):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"tracking: wandb reads {file}, which may send its API key to another host",
                "delete the file; WANDB_BASE_URL, WANDB_ENTITY and WANDB_PROJECT set the same",
            )
