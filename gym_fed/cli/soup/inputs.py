"""The inputs of `gym soup merge`: the updates and their base.

The base is searched for on this machine and checked against the digest in the updates.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

if TYPE_CHECKING:
    from gym_fed.base.models import LoadedModel
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.delta.vocabulary import VocabularyChange
    from gym_fed.soup.vocabulary_union import VocabularyUnion


_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
"""A name that may be looked up: one word, or an owner and a name. A received file cannot name a local path."""


def base_of(updates: Sequence[str], base: str | None) -> tuple[LoadedModel, BaseSpec]:
    """Load the given base, or the base of the updates.

    A ``.gymdelta`` names its base and the digest of its weights; a LoRA run names the path of its base. Candidates are,
    in this order, gym-nano, a folder of that name here or next to the updates, and the Hugging Face cache (by name, by
    its last part, and by revision). The digest decides.

    Args:
        updates: The updates named in the command.
        base: A model folder or name, or None.

    Raises:
        GymError: ``USAGE`` if nothing names a base; ``BASE_MISMATCH`` if the updates name different bases;
            ``MODEL_NOT_FOUND`` with the base and the searched places.
    """
    from gym_fed.base.models import load_model, model_name
    from gym_fed.delta.base import BaseSpec

    if base is not None:
        loaded = load_model(base)
        return loaded, BaseSpec.of(loaded.model, model_name(base))
    named, run_base = _named(updates)
    if named is None:
        if run_base is None:
            raise GymError(
                ErrorCode.USAGE,
                "no update names its base: none is a readable .gymdelta or a LoRA run",
                "pass the base they were made from with --base",
            )
        loaded = load_model(run_base)
        return loaded, BaseSpec.of(loaded.model, model_name(run_base))
    name, digest = named
    tried: list[str] = []
    for candidate in _candidates(name, updates, run_base):
        try:
            loaded = load_model(candidate)
        except GymError as error:
            tried.append(f"{candidate}: {error.message}")
            continue
        spec = BaseSpec.of(loaded.model, name)
        if spec.digest == digest:
            return loaded, spec
        tried.append(f"{candidate}: has the digest {spec.digest[:19]}...")
    searched = (
        "; ".join(tried)
        or "no such folder in the current folder, next to the updates or in the Hugging Face cache"
    )
    raise GymError(
        ErrorCode.MODEL_NOT_FOUND,
        f"the updates were made for base {_short(name)} with digest {digest}, which is not on this machine "
        f"({searched})",
        "pass its folder or name with --base"
        + (f", or fetch it once with: hf download {name}" if "/" in name and _NAME.fullmatch(name) else ""),
    )


class Inputs:
    """Opens updates of one base.

    Args:
        base: The loaded base.
        spec: The base's description.
        folder: Folder for temporary files.
        stack: Exit stack that closes the opened files.
        allow_differences: True to accept a fine-tune whose config or tokenizer differs from the base's.

    Attributes:
        base: The loaded base; with a row for each added token after ``with_union_vocabulary``.
        spec: The description of ``base``, under the given base's digest.
        not_merged: Changes of each update beyond its weights, which are not in the soup.
    """

    def __init__(
        self,
        base: LoadedModel,
        spec: BaseSpec,
        folder: Path,
        stack: ExitStack,
        *,
        allow_differences: bool = False,
    ) -> None:
        self.base = base
        self.spec, self._stack = spec, stack
        self._allow_differences = allow_differences
        self._paths = (folder / f"{number}.gymdelta" for number in itertools.count(1))
        self._union: VocabularyUnion | None = None
        self._change: VocabularyChange | None = None
        self.not_merged: dict[str, list[str]] = {}

    def open(self, name: str) -> DeltaFile:
        """Open a ``.gymdelta``, or compute the float32 difference of a model folder or LoRA run from the base.

        Raises:
            GymError: If it cannot be read, or has a different base.
        """
        from gym_fed.delta.file import DeltaFile

        path = Path(name)
        if not (path.is_file() or path.suffix == ".gymdelta"):
            path = self._difference(name)
        return self._stack.enter_context(DeltaFile.open(path, self.spec, added_tokens=True))

    def with_union_vocabulary(
        self, updates: Mapping[int, DeltaFile], names: Sequence[str]
    ) -> dict[int, DeltaFile]:
        """Restate updates against a base with all of their added tokens, if there are any (``VocabularyUnion``).

        Raises:
            GymError: ``BASE_MISMATCH`` if the tokens cannot be added to the base.
        """
        from gym_fed.soup.vocabulary_union import VocabularyUnion

        union = VocabularyUnion.of(list(updates.values()), self.base, self.spec)
        if union is None:
            return dict(updates)
        self._union, self.base = union
        self.spec = self._union.wider
        for index, update in updates.items():
            if differences := self._union.left_out(update):
                self.not_merged.setdefault(names[index], []).extend(differences)
        return {index: self.restated(update) for index, update in updates.items()}

    def restated(self, delta: DeltaFile) -> DeltaFile:
        """Return a delta of the given base as one of ``base``."""
        from gym_fed.delta.file import DeltaFile

        if self._union is None:
            return delta
        path = next(self._paths)
        self._union.restate(delta, path)
        return self._stack.enter_context(DeltaFile.open(path, self.spec))

    @contextmanager
    def on_given_base(self, soup: DeltaFile) -> Iterator[DeltaFile]:
        """Open a soup of ``base`` as a delta of the given base, without the rows of added tokens."""
        from gym_fed.delta.file import DeltaFile

        if self._union is None:
            yield soup
            return
        path = next(self._paths)
        self._change = self._union.split(soup, path)
        with DeltaFile.open(path, self._union.spec) as delta:
            yield delta

    def attach_vocabulary(self, soup: Path) -> str:
        """Add the rows that ``on_given_base`` left out, and describe them; empty without any."""
        from gym_fed.delta.vocabulary import attach_vocabulary

        if self._union is None or not self._change:
            return ""
        attach_vocabulary(soup, self._union.spec, self._change)
        return str(self._change)

    def _difference(self, name: str) -> Path:
        from gym_fed.base.modeling.adapters import merged
        from gym_fed.base.modeling.differences import require_same_settings
        from gym_fed.base.models import load_tuned
        from gym_fed.config.delta import CodecPolicy
        from gym_fed.delta.base import model_tensors
        from gym_fed.delta.encode import encode_delta, lora_delta
        from gym_fed.delta.factors import lora_change
        from gym_fed.delta.vocabulary import attach_vocabulary, split_vocabulary

        loaded = load_tuned(name, self.base.name)
        tuned: Any = loaded.model
        tokenizers = (self.base.tokenizer, loaded.tokenizer)
        different = require_same_settings(
            name, self.base.model, tuned, tokenizers, allow=self._allow_differences, added_tokens=True
        )
        if different:
            self.not_merged[name] = list(map(str, different))
        path = next(self._paths)
        if hasattr(tuned, "peft_config"):
            change = lora_change(tuned, model_tensors(self.base.model), tokenizers=tokenizers)
            if change.factors:
                policy = CodecPolicy(
                    codec="lora", lora_rank=1, factors="float32", dense_dtype="float32", error_feedback=False
                )
                lora_delta(change.factors, path, self.spec, policy=policy, values=change.values)
                if change.added:
                    attach_vocabulary(path, self.spec, change.added)
                return path
            tuned = merged(tuned, name)
        exact = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
        split, added = split_vocabulary(tuned, model_tensors(self.base.model), tokenizers, name)
        encode_delta(split, self.base.model, exact, path, self.spec)
        if added:
            attach_vocabulary(path, self.spec, added)
        return path


def open_all(
    inputs: Inputs, names: list[str], skip_broken: bool
) -> tuple[dict[int, DeltaFile], dict[str, str]]:
    """Open the updates; return them by index, and by name the reason for each that cannot be used."""
    opened: dict[int, DeltaFile] = {}
    refused: dict[str, str] = {}
    for index, name in enumerate(names):
        try:
            opened[index] = inputs.open(name)
        except GymError as error:
            if not skip_broken:
                hint = f"{error.hint}; " if error.hint else ""
                raise GymError(
                    error.code, error.message, f"{hint}or continue without it: --skip-broken"
                ) from error
            refused[name] = error.message
            console.err.print(f"left out: {error.message}")
    if not opened:
        raise GymError(ErrorCode.USAGE, f"no update of {len(names)} can be used")
    return opened, refused


def _named(updates: Sequence[str]) -> tuple[tuple[str, str] | None, str | None]:
    """Return name and digest of the deltas' base, and the base folder of a LoRA run; None if they are not named."""
    from gym_fed.delta.file import DeltaFile

    bases: dict[str, tuple[str, str]] = {}  # by digest: the first update of this base, and the base's name
    run_base: str | None = None
    for update in updates:
        path = Path(update).expanduser()
        adapter = path / "adapter_config.json"
        if adapter.is_file():
            run_base = run_base or _base_of_run(adapter)
        elif path.is_file():
            try:
                with DeltaFile.open(path, added_tokens=True) as delta:
                    bases.setdefault(delta.manifest.base_digest, (update, delta.manifest.base_model))
            except GymError:
                continue  # reported when all updates are opened, or omitted with --skip-broken
    if len(bases) > 1:
        made_for = [
            f"{update} was made for base {_short(name)} with digest {digest}"
            for digest, (update, name) in itertools.islice(bases.items(), 2)
        ]
        raise GymError(ErrorCode.BASE_MISMATCH, ", ".join(made_for), "merge only updates of one base")
    for digest, (_, name) in bases.items():
        return (name, digest), run_base
    return None, run_base


def _base_of_run(adapter: Path) -> str | None:
    try:
        name = read_object(adapter).get("base_model_name_or_path")
    except (OSError, GymError):
        return None  # loading the run reports the problem
    return str(name) if name else None


def _candidates(name: str, updates: Sequence[str], run_base: str | None) -> Iterator[str]:
    """Return the models on this machine that may be the base, without duplicates."""
    from gym_fed.base.models import NANO

    places: list[str] = []
    if _NAME.fullmatch(name):
        folders = [Path(), *(Path(update).expanduser().parent for update in updates)]
        if name == NANO:
            places.append(NANO)
        places += [str(folder / name) for folder in folders if (folder / name / "config.json").is_file()]
        places += _cached(name)
    yield from dict.fromkeys([*places, *([run_base] if run_base else [])])


def _cached(name: str) -> list[str]:
    """Return models of the Hugging Face cache whose name ends in ``name`` or whose revision it is."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = []
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        if repo.repo_type != "model":
            continue
        same = name in (repo.repo_id, repo.repo_id.rpartition("/")[2])
        for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified):
            if same or revision.commit_hash == name:
                models.append(str(revision.snapshot_path))
    return models


def _short(name: str) -> str:
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:77]}..."
