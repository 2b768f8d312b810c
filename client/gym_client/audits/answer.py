"""The answer to an audit: one safetensors file with the task, the manifest, the rows, the delta and the drawn states.

Its tensors are ``document`` (JSON as bytes), ``delta`` (the bytes of the update's file), and the states, named
``<step>/<name>``: before and after every drawn step, before training, and at the end of training. An auditor does not
trust the file. Its size is limited, and its contents are checked against the update's id and the draw, both of which
the hub's ledger records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from gym_client.audits.draws import Draw
from gym_client.audits.evidence import Evidence
from gym_fed.config.hub.task import TaskSpec
from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file
from gym_fed.core.json_files import canonical_digest, strict_json
from gym_fed.core.text import plain, readable_bytes
from gym_fed.trust.identity.manifest import Sha256, UpdateManifest
from gym_fed.trust.ledger.audits import step_leaf
from gym_fed.trust.ledger.merkle import Tree, verify_inclusion

if TYPE_CHECKING:
    from torch import Tensor

_DOCUMENT, _DELTA = "document", "delta"
_MAX_HEADER_BYTES = 16 << 20
_MAX_ROWS = 1_000_000
_MAX_DOCUMENT_BYTES = 256 << 20


class ProvedLeaf(StrictModel):
    """The digests of one step, with the Merkle path from its leaf to ``training_root``."""

    step: int = Field(ge=0, le=100_000)
    batch: str = Field(pattern=r"^([0-9a-f]{64})?$")
    state: Sha256
    path: list[Sha256] = Field(max_length=32)


class AnswerDocument(StrictModel):
    """The JSON document of an answer."""

    format: Literal["gym-audit-answer-1"] = "gym-audit-answer-1"
    manifest: UpdateManifest
    task: TaskSpec
    leaves: list[ProvedLeaf] = Field(max_length=200)
    rows: list[dict[str, Any]] = Field(max_length=_MAX_ROWS)


def states_of(draw: Draw) -> list[int]:
    """Return the steps whose states an answer contains; 0 is the state before training."""
    around = {step + offset for step in draw.steps for offset in (-1, 0)}
    return sorted({0, draw.num_steps} | around)


def write_answer(path: Path, evidence: Evidence, draw: Draw) -> None:
    """Write the answer to a draw.

    Raises:
        GymError: ``FILE_EXISTS``; ``STATE_CORRUPT`` if the evidence differs from what the update committed to.
    """
    import torch
    from safetensors.torch import load_file, save

    from gym_fed.training.audits.recorder import leaf_hashes, read_leaves, state_path

    if path.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists", "choose another name")
    leaves = read_leaves(evidence.folder)
    hashes, manifest = leaf_hashes(leaves), evidence.manifest
    tree = Tree(hashes)
    if tree.root(tree.size) != manifest.training_root or tree.size != draw.num_steps + 1:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{evidence.folder} does not match the training record that update {draw.update[:12]} committed to",
            "restore the folder from a backup",
        )
    numbers = states_of(draw)
    document = AnswerDocument(
        manifest=manifest,
        task=evidence.task,
        leaves=[
            ProvedLeaf(step=number, **leaves[number], path=tree.inclusion(number, tree.size))
            for number in numbers
        ],
        rows=evidence.rows(),
    )
    text = json.dumps(document.model_dump(mode="json"), ensure_ascii=False).encode()
    tensors = {
        f"{number}/{name}": tensor
        for number in numbers
        for name, tensor in load_file(state_path(evidence.folder, number)).items()
    }
    for name, data in ((_DOCUMENT, text), (_DELTA, evidence.delta_path.read_bytes())):
        tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with atomic_file(path) as target:
        target.write(save(tensors))


@dataclass
class AuditAnswer:
    """An answer to a draw. The document and proofs are already verified; states are verified when they are read.

    Attributes:
        document: The JSON document.
        delta: Contents of the update's file.
    """

    path: Path
    document: AnswerDocument
    delta: bytes
    _file: Any
    _names: frozenset[str]

    @classmethod
    def open(cls, path: Path, draw: Draw, max_bytes: int) -> AuditAnswer:
        """Read and verify an answer.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``TOO_LARGE`` before anything is read; ``AUDIT_INVALID`` with the part that is
                malformed or differs from what the update committed to.
        """
        _check_size(path, max_bytes)
        file = _open(path)
        names = frozenset(file.keys())
        document = _parse(path, _bytes_of(path, file, _DOCUMENT, _MAX_DOCUMENT_BYTES), draw)
        delta = _bytes_of(path, file, _DELTA, max_bytes)
        answer = cls(path, document, delta, file, names)
        answer._check(draw)
        return answer

    def batches(self) -> dict[int, str]:
        """Return the committed digests of the batches, by step."""
        return {leaf.step: leaf.batch for leaf in self.document.leaves}

    def state(self, number: int, num_weights: int) -> dict[str, Tensor]:
        """Read the state after a step and compare it with its committed leaf.

        Args:
            number: Number of the step; 0 for the state before training.
            num_weights: Number of trained weights.

        Raises:
            GymError: ``AUDIT_INVALID``.
        """
        import torch

        from gym_fed.training.audits.states import MOMENTS, WEIGHTS, state_digest

        expected = (WEIGHTS, *MOMENTS) if number else (WEIGHTS,)
        prefix = f"{number}/"
        if {name.removeprefix(prefix) for name in self._names if name.startswith(prefix)} != set(expected):
            raise self._invalid(f"the state of step {number} must have exactly {', '.join(expected)}")
        for name in expected:
            part = self._file.get_slice(prefix + name)
            if part.get_dtype() != "F32" or part.get_shape() != [num_weights]:
                raise self._invalid(
                    f"the state of step {number}: {name} is not a float32 vector of length {num_weights}"
                )
        state = {name: self._file.get_tensor(prefix + name) for name in expected}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
            raise self._invalid(f"the state of step {number} has non-finite values")
        leaf = next(leaf for leaf in self.document.leaves if leaf.step == number)
        if state_digest(state) != leaf.state:
            raise self._invalid(f"the state of step {number} does not match the update's commitment")
        return state

    def _check(self, draw: Draw) -> None:
        manifest = self.document.manifest
        if manifest.digest != draw.update:
            raise self._invalid(f"it is for update {manifest.digest[:12]}, not {draw.update[:12]}")
        if hashlib.sha256(self.delta).hexdigest() != manifest.delta_sha256:
            raise self._invalid("its delta differs from the update's delta")
        if manifest.training_root is None:
            raise self._invalid("the update has no training_root")
        if [leaf.step for leaf in self.document.leaves] != states_of(draw):
            raise self._invalid(f"it does not contain the drawn steps: {', '.join(map(str, draw.steps))}")
        for leaf in self.document.leaves:
            known = step_leaf(leaf.step, leaf.batch, leaf.state)
            if not verify_inclusion(known, leaf.step, draw.num_steps + 1, leaf.path, manifest.training_root):
                raise self._invalid(
                    f"the proof of step {leaf.step} does not lead to the update's training_root"
                )
        expected = {_DOCUMENT, _DELTA}
        if strays := [name for name in self._names - expected if not _is_state(name, states_of(draw))]:
            raise self._invalid(f"it has an unexpected tensor {min(strays)[:80]!r}")

    def _invalid(self, problem: str) -> GymError:
        return invalid(self.path, problem)


def invalid(path: Path, problem: str) -> GymError:
    """Create the error for an answer that cannot be used."""
    return GymError(
        ErrorCode.AUDIT_INVALID,
        plain(f"{path}: {problem}", 500),
        "ask the contributor to write it again with: gym-client audit answer",
    )


def _is_state(name: str, numbers: Iterable[int]) -> bool:
    return name.partition("/")[0] in set(map(str, numbers))


def _check_size(path: Path, max_bytes: int) -> None:
    if not path.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"there is no file {path}")
    size = path.stat().st_size
    if size > max_bytes:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"{path} has {readable_bytes(size)}; an answer may have at most {readable_bytes(max_bytes)}",
            "raise max_audit_bytes in policy.yaml if the audited model needs it",
        )
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if not 0 < header <= min(_MAX_HEADER_BYTES, size):
        raise invalid(path, "it is not a safetensors file, or its header is too large")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise invalid(path, f"it is not a safetensors file: {error}") from error


def _bytes_of(path: Path, file: Any, name: str, max_bytes: int) -> bytes:
    if name not in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
        raise invalid(path, f"it has no {name}")
    part = file.get_slice(name)
    shape = part.get_shape()
    if part.get_dtype() != "U8" or len(shape) != 1 or shape[0] > max_bytes:
        raise invalid(path, f"its {name} is not a uint8 vector of at most {readable_bytes(max_bytes)}")
    return bytes(file.get_tensor(name).numpy().tobytes())


def _parse(path: Path, text: bytes, draw: Draw) -> AnswerDocument:
    try:
        value = strict_json(text)
        # Plug-ins are checked before the task is parsed, since parsing imports the plug-ins that the task names.
        task = value.get("task") if isinstance(value, dict) else None
        if canonical_digest(task) != draw.task:
            raise invalid(path, f"its task differs from the task of round {draw.server_round}")
        return AnswerDocument.model_validate(value)
    except ValidationError as error:
        raise invalid(path, f"its document: {first_problem(error)}") from error
    except ValueError as error:
        raise invalid(path, f"its document: {error}") from error
