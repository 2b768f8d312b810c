"""Error feedback: add what one round's encoding lost to the next round's delta.

Stich et al. 2018, "Sparsified SGD with Memory" (alg. 1, lines 4-6), and Karimireddy et al. 2019, "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes" (alg. 2, EF-SIGNSGD): with the true delta ``g_t`` and the residual
``e_t``, send ``C(g_t + e_t)`` and keep ``e_{t+1} = g_t + e_t - C(g_t + e_t)``. Sums telescope, so over any number of
rounds the sent deltas plus the residual equal the sum of the true deltas, except for float32 rounding. With a decay
``b`` the update is ``g_t + b e_t`` (Sarfi et al. 2025, "SparseLoCo", alg. 1), so that old errors fade.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from gym_quant.codec import sum_of_squares
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder, fsync_tree, full_disk_named, make_folder
from gym_fed.core.json_files import canonical_json

_METADATA_KEY = "gym_residual"
_FORMAT = 1


class ErrorFeedback:
    """A residual on disk, of a contributor or the server, float32 by tensor name.

    Updates have two phases, because a residual may only change after its update was acknowledged: ``record``
    gathers the next residual, ``stage`` writes it next to the current one, ``commit`` puts it in place.
    """

    def __init__(
        self, path: Path, lineage: str, current: dict[str, Tensor], exponents: dict[str, int] | None = None
    ) -> None:
        """Use ``load`` instead."""
        self.path = path
        self.lineage = lineage
        self.exponents = exponents or {}
        """Exponents of the steps of the last encoding, for codecs whose deltas add up (``Codec.adds_up``)."""
        self._current = current
        self._next: dict[str, Tensor] = {}
        self._next_exponents: dict[str, int] = {}
        self._decay = 1.0

    @classmethod
    def load(cls, path: str | Path, lineage: str) -> ErrorFeedback:
        """Read the committed residual; start from zero if there is no file.

        Args:
            path: Safetensors file of the residual.
            lineage: Digest of the base from which the federation started. Global versions descend from it, so
                a residual outlives rounds but is never used with a different model.

        Raises:
            GymError: ``BASE_MISMATCH`` for a residual from a different lineage, ``STATE_CORRUPT`` for a broken one.
        """
        file = Path(path)
        return cls(file, lineage, *(_read(file, lineage) if file.exists() else ({}, {})))

    def compensated(self, name: str, delta: Tensor) -> Tensor:
        """Add the committed residual of this tensor, times the decay, to ``delta``; float32 on the CPU.

        Raises:
            GymError: ``BASE_MISMATCH`` if the shapes differ.
        """
        exact = delta.detach().to("cpu", torch.float32)
        held = self._current.get(name)
        if held is None:
            return exact
        if held.shape != exact.shape:
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"tensor {name!r}: {self.path} has shape {list(held.shape)}, but the delta has {list(exact.shape)}",
                "reset the residual",
            )
        return exact + (held if self._decay == 1.0 else held * self._decay)

    def begin(self, decay: float = 1.0) -> None:
        """Drop the uncommitted records of an earlier encoding; ``encode_delta`` calls this first.

        ``decay`` multiplies the committed residual in this encoding.
        """
        self._next, self._next_exponents, self._decay = {}, {}, decay

    def record_exponents(self, exponents: Mapping[str, int]) -> None:
        """Record the exponents of this encoding's steps; those of other tensors stay."""
        self._next_exponents = {**self.exponents, **exponents}

    def record(self, name: str, lost: Tensor) -> None:
        """Record the encoding error of a tensor, compensated minus decoded. It takes effect at ``commit``."""
        self._next[name] = lost.detach().to("cpu", torch.float32).contiguous()

    def residual(self, name: str) -> Tensor | None:
        """The committed residual of a tensor; None for zero."""
        return self._current.get(name)

    def names(self) -> tuple[str, ...]:
        """Sorted names of the tensors with a committed residual."""
        return tuple(sorted(self._current))

    def norm(self) -> float:
        """L2 norm of the committed residual."""
        return math.sqrt(math.fsum(sum_of_squares(t) for t in self._current.values()))

    def staged_path(self) -> Path:
        """The default path of ``stage``."""
        return self.path.with_name(f"{self.path.name}.staged")

    def stage(self, path: str | Path | None = None) -> Path:
        """Write the recorded residual to ``path``, durably, without touching the committed one."""
        target = Path(path) if path is not None else self.staged_path()
        residuals = {name: tensor for name, tensor in sorted(self._next.items()) if bool(tensor.any())}
        more = {"exponents": self._next_exponents} if self._next_exponents else {}
        head = canonical_json({"format": _FORMAT, "lineage": self.lineage, **more}).decode("utf-8")
        make_folder(target.parent)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
        with full_disk_named(target):
            try:
                save_file(residuals, partial, {_METADATA_KEY: head})  # `save` would copy all tensors twice
                fsync_tree(partial)
                os.replace(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        fsync_folder(target.parent)
        return target

    def commit(self, path: str | Path | None = None) -> None:
        """Replace the committed residual by the staged one; after a crash, call ``load`` and ``commit``.

        Raises:
            GymError: ``STATE_CORRUPT`` if nothing was staged or the staged file is broken.
        """
        staged = Path(path) if path is not None else self.staged_path()
        if not staged.exists():
            problem = f"no staged residual at {staged}"
            raise GymError(ErrorCode.STATE_CORRUPT, problem, "stage it before the upload")
        fresh, exponents = _read(staged, self.lineage)
        make_folder(self.path.parent)
        os.replace(staged, self.path)
        fsync_folder(self.path.parent)
        self._current, self.exponents = fresh, exponents
        self.begin()

    def save(self) -> None:
        """Run ``stage`` and ``commit`` together, if no acknowledgement is needed."""
        self.stage()
        self.commit()

    def discard(self) -> None:
        """Drop records and the staged residual after a refused update; the committed residual stays."""
        self.begin()
        self.staged_path().unlink(missing_ok=True)

    def reset(self) -> None:
        """Delete the residual, also on disk."""
        self.discard()
        self._current, self.exponents = {}, {}
        self.path.unlink(missing_ok=True)


def _read(path: Path, lineage: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            head = json.loads((file.metadata() or {}).get(_METADATA_KEY, "null"))
            tensors = dict(_finite_float32(path, ((name, file.get_tensor(name)) for name in file.keys())))  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise _corrupt(path, str(error)) from error
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise _corrupt(path, f"its metadata {head!r} is not of format {_FORMAT}")
    if head.get("lineage") != lineage:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"residual {path} belongs to the lineage of {head.get('lineage')}, not of {lineage}",
            "keep one residual per federation, or reset this one",
        )
    exponents = head.get("exponents", {})
    if not isinstance(exponents, dict) or not all(type(value) is int for value in exponents.values()):
        raise _corrupt(path, "its exponents are not integers")
    return tensors, exponents


def _finite_float32(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
            raise _corrupt(path, f"tensor {name!r} is not finite float32")
        yield name, tensor


def _corrupt(path: Path, why: str) -> GymError:
    return GymError(ErrorCode.STATE_CORRUPT, f"residual {path}: {why}", "delete the file to start from zero")
