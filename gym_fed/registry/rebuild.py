"""A model from its base and a delta: rebuilt, compared with the digest that was signed, and written as a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from gym_fed.base.models import LoadedModel, model_name, quiet_loading, resolve
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.delta.apply import apply_delta
from gym_fed.delta.base import BaseSpec, tensors_digest
from gym_fed.delta.file import DeltaFile
from gym_fed.export.source import TRAVELS


def product_free(delta: DeltaFile) -> bool:
    """Whether decoding multiplies no factors: then every machine gets the same bits."""
    from gym_quant import get_codec

    return all(get_codec(one.codec).rank(one.params) is None for one in delta.manifest.tensors)


def added(base: LoadedModel, delta: DeltaFile) -> str:
    """Add a delta to its base in memory, and give the digest of the sum."""
    apply_delta(base.model, delta)
    return tensors_digest(base.model)


def rebuild(base: LoadedModel, file: Path, digest: str | None, folder: Path) -> None:
    """Write the model that ``base`` and the delta ``file`` make into ``folder``, beside what is there.

    Args:
        base: Loaded, its digest checked; it is changed in place.
        file: A ``.gymdelta``.
        digest: What the sum's must be; None where machines differ in it.
        folder: Exists.

    Raises:
        GymError: ``DELTA_INVALID``, ``BASE_MISMATCH``; ``HASH_MISMATCH`` for another sum than was signed.
    """
    spec = BaseSpec.of(base.model, model_name(base.name))
    with DeltaFile.open(file, spec) as delta:
        found = added(base, delta)
    if digest is not None and found != digest:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{file.name}: base and delta make a model of digest {found}, and {digest} was signed",
            "the version is wrong: ask its author for another",
        )
    with quiet_loading():
        base.model.save_pretrained(str(folder))
        base.tokenizer.save_pretrained(str(folder))
    home = Path(resolve(base.name))
    for pattern in TRAVELS:
        for text in sorted(home.glob(pattern)):
            if lies_in(text, home):
                shutil.copyfile(text, folder / text.name)
