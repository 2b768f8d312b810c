"""Saves checkpoints so that one is always intact: the new one is sealed before an older one is deleted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from gym_fed.core.files import full_disk_named
from gym_fed.training.processes.ranks import is_main
from gym_fed.training.run.checkpoints import break_seal, seal

_Trainer: Any = object  # what the mix-in is placed before


class SealedCheckpoints(_Trainer):  # type: ignore[misc]
    """A mix-in for trainers that seals each checkpoint after the last callback has added its files.

    What a failed save has written is deleted: a full disk then has room again for everything else.
    """

    args: Any
    state: Any
    accelerator: Any
    _unsealed: Path | None = None

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        self._unsealed = folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with full_disk_named(folder):
                if is_main():
                    break_seal(folder)
                super()._save_checkpoint(*arguments, **named)
        finally:
            self.args.save_total_limit = limit

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        self._unsealed = None
        try:
            super()._maybe_log_save_evaluate(*arguments, **named)
            if self._unsealed is not None:
                self._complete(self._unsealed)
        except Exception:
            if self._unsealed is not None and is_main():
                shutil.rmtree(self._unsealed, ignore_errors=True)
            raise

    def _complete(self, checkpoint: Path) -> None:
        """Seal the checkpoint, then delete those beyond ``save_total_limit``."""
        from transformers.trainer_utils import rotate_checkpoints

        self.accelerator.wait_for_everyone()  # every process writes its own random state
        if not is_main():
            return
        with full_disk_named(checkpoint):
            seal(checkpoint)
        self._unsealed = None
        rotate_checkpoints(
            output_dir=self.args.output_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )
