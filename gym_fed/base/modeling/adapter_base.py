"""Record the digest of an adapter's base, and check that an adapter belongs to a base."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from gym_fed.base.modeling.adapters import CONFIG, Adapter
from gym_fed.base.modeling.tensor_files import folder_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

BASE_RECORD = "adapter_base.json"
"""File in an adapter's folder with the digest of the base that it was trained on."""
_QUANTISED_NAME = re.compile(r"(-unsloth)?(-bnb-[48]bit|-gptq(-int[48])?|-awq)$", re.IGNORECASE)
_log = logging.getLogger(__name__)


def record_base(adapter: Path, base: Path | None) -> None:
    """Write the digest of an adapter's base next to it, if the base's files can be hashed."""
    digest = None if base is None else folder_digest(base)
    if digest is not None:
        (adapter / BASE_RECORD).write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")


def require_base(adapter: Adapter, model: str, folders: tuple[Path | None, Path | None]) -> None:
    """Reject an adapter that was trained on a base other than ``model``; warn if only the names differ.

    A recorded digest decides. Without one, the weights of both bases are compared if both are on this machine.
    Otherwise names are compared without their owners and the suffixes of quantised copies, and a difference is only
    reported, since a model may have several names.

    Args:
        adapter: The adapter to use.
        model: Name or folder of the base.
        folders: Folders of the adapter's own base and of ``model``; None for a model that is not on this machine.

    Raises:
        GymError: ``BASE_MISMATCH`` with both bases.
    """
    own, given = folders
    if adapter.base == model or (own is not None and given is not None and own.resolve() == given.resolve()):
        return
    alike = adapter.base is not None and _short(adapter.base) == _short(model)
    requantised = (
        alike and adapter.base is not None and Path(adapter.base).name.lower() != Path(model).name.lower()
    )
    actual = None if given is None or requantised else folder_digest(given)
    expected = _recorded(adapter.folder)
    if actual is not None and expected is None and own is not None:
        expected = folder_digest(own)
    if actual is not None and expected is not None:
        if actual != expected:
            raise _other_base(adapter, model, expected, actual)
        return
    if not alike:
        _log.warning(
            "adapter %s was trained on %s and is loaded on %s: no digest shows that they are the same model",
            adapter.name,
            adapter.base or "an unnamed base",
            model,
        )


def _recorded(adapter: Path) -> str | None:
    file = adapter / BASE_RECORD
    digest = read_object(file).get("digest") if file.is_file() else None
    return digest if isinstance(digest, str) else None


def _other_base(adapter: Adapter, model: str, recorded: str, actual: str) -> GymError:
    base = adapter.base or "another base"
    return GymError(
        ErrorCode.BASE_MISMATCH,
        f"adapter: {adapter.name} was trained on {base} (weights {recorded[:19]}...), but {model} has different "
        f"weights ({actual[:19]}...)",
        f"use it on {base}, or correct base_model_name_or_path of {adapter.folder / CONFIG}",
    )


def _short(name: str) -> str:
    return _QUANTISED_NAME.sub("", Path(name).name).lower()
