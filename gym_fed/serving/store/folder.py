"""Where variants are kept unless another folder is named: one place for every command."""

from __future__ import annotations

import os
from pathlib import Path

from gym_fed.core.files import default_home


def variants_folder(store: Path | None = None) -> Path:
    """The folder that was named, ``$GYM_VARIANTS``, or ``variants`` of ``$GYM_HOME``, which is ``~/.gym-fed``."""
    return (store or Path(os.environ.get("GYM_VARIANTS") or default_home() / "variants")).expanduser()


def present_store() -> Path | None:
    """``variants_folder()``, where variants have been added there; None where not."""
    folder = variants_folder()
    return folder if (folder / "variants.db").is_file() else None
