"""Record a training run for audits: digests of every step, and the states between steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.text import counted, readable_bytes
from gym_fed.training.audits.observer import StepObserver
from gym_fed.training.audits.states import MOMENTS, state_digest, take_state, trained_parameters
from gym_fed.trust.ledger.audits import step_leaf, training_root

LEAVES_NAME = "leaves.jsonl"


class StepRecorder(StepObserver):
    """Writes ``leaves.jsonl`` and one file of weights and moments per step into a folder.

    A resumed run continues the record from its checkpoint.

    Args:
        folder: The record's folder; created if it is missing.
        max_bytes: Maximum total size of the states, in bytes.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__()
        self._folder, self.max_bytes = folder, max_bytes
        self._leaves_path = folder / LEAVES_NAME

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the state before training, or continue the record of a resumed run."""
        self._parameters = trained_parameters(kwargs["model"])
        size = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)
        needed = size * (1 + len(MOMENTS)) * (state.max_steps + 1)
        if needed > self.max_bytes:
            raise GymError(
                ErrorCode.POLICY_REFUSED,
                f"the hub audits updates: the recorded states of {counted(state.max_steps, 'step')} need "
                f"{readable_bytes(needed)}, but only {readable_bytes(self.max_bytes)} of max_audit_bytes is left",
                "raise max_audit_bytes in policy.yaml; gym-client audit list deletes records not drawn for an audit",
            )
        make_folder(self._folder)
        self._batches = []
        if state.global_step == 0:
            self._leaves_path.unlink(missing_ok=True)
            self._record(0, "", None)
            self.fix_randomness(args, state)
            return
        leaves = read_leaves(self._folder)[: state.global_step + 1]
        if len(leaves) != state.global_step + 1:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"the audit record in {self._folder} has {counted(len(leaves), 'state')}, but the checkpoint is from "
                f"step {state.global_step}",
                "delete the task's folder to train again",
            )
        write_atomically(self._leaves_path, "".join(map(_line, leaves)).encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the state after a step."""
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        self._record(state.global_step, self.take_batch_digest(), optimizer)
        self.fix_randomness(args, state)

    def root(self) -> str:
        """Return the Merkle root of the record."""
        return training_root(leaf_hashes(read_leaves(self._folder)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sync the record to disk, since a resumed run needs it up to the checkpoint."""
        with self._leaves_path.open("rb") as file:
            os.fsync(file.fileno())

    def _record(self, step: int, batch: str, optimizer: Any) -> None:
        state = take_state(self._parameters, optimizer)
        save_file(state, state_path(self._folder, step))
        with self._leaves_path.open("a", encoding="utf-8") as file:
            file.write(_line({"batch": batch, "state": state_digest(state)}))


def _line(leaf: dict[str, str]) -> str:
    return json.dumps(leaf) + "\n"


def state_path(folder: Path, step: int) -> Path:
    """Return the path of the record's file with the state after a step."""
    return folder / f"{step}.safetensors"


def read_leaves(folder: Path) -> list[dict[str, str]]:
    """Return the digests of batch and state for each step, starting from step 0."""
    path = folder / LEAVES_NAME
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def leaf_hashes(leaves: list[dict[str, str]]) -> list[str]:
    """Return the leaves of a record's Merkle tree."""
    return [step_leaf(step, leaf["batch"], leaf["state"]) for step, leaf in enumerate(leaves)]
