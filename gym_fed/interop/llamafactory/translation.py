"""Recognise a LLaMA-Factory file and its job, and track which of its keys are translated, not needed or lost."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gym_fed.config.parsed import Job, Translation

_MODEL = "model_name_or_path"
_STAGE_KEYS = ("stage", "finetuning_type", "dataset_dir", "template", "do_train", "cutoff_len")
_VERSION_1_KEYS = (
    *("model_class", "train_dataset", "peft_config", "kernel_config", "dist_config", "quant_config"),
    *("optim_config", "init_config", "micro_batch_size", "batching_strategy", "sample_backend"),
)


def is_llamafactory(values: Mapping[str, Any]) -> bool:
    """True if a YAML file is LLaMA-Factory's: it has a model and a stage, or another key that only it has."""
    return (_MODEL in values and any(key in values for key in _STAGE_KEYS)) or is_version_1(values)


def is_version_1(values: Mapping[str, Any]) -> bool:
    """True for a file of LLaMA-Factory's version 1, whose key ``model`` is the same as ours."""
    return "model" in values and any(key in values for key in _VERSION_1_KEYS)


class Translator:
    """Reads keys of the file and writes ours, and tracks which keys have not been read.

    Args:
        given: The file's values.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.result = Translation()
        self._given = {key: value for key, value in given.items() if value is not None}
        self._untaken = dict.fromkeys(given)
        self.known: dict[str, None] = {}
        """Every key that was looked up. These are the known keys, besides the tables of ``keys``."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return the file's value of ``key`` and mark the key as taken."""
        self._untaken.pop(key, None)
        self.known[key] = None
        return self._given.get(key, default)

    def has(self, key: str) -> bool:
        """True if the file gives ``key`` a value."""
        self.known[key] = None
        return key in self._given

    def put(self, path: str, value: Any, origin: str | None = None) -> None:
        """Set one of our keys, such as ``lora.r``; ``origin`` is the key of the file that it comes from."""
        keys = tuple(path.split("."))
        place = self.result.values
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        if origin is not None and self.has(origin):
            self.result.origins[keys] = origin

    def move(self, key: str, path: str, default: Any = None) -> None:
        """``take`` a value and ``put`` it, unless the file has none and there is no default."""
        value = self.take(key, default)
        if value is not None:
            self.put(path, value, key)

    def note(self, key: str, text: str) -> None:
        """Add a note on a key that does not change the result."""
        self.result.notes[key] = text

    def lose(self, key: str, why: str) -> None:
        """Record a key on which the result depends and which cannot be translated."""
        self.result.lost[key] = why

    def lose_if(self, key: str, why: str, *, harmless: tuple[Any, ...] = (False,)) -> None:
        """``lose`` unless the key is absent or its value is in ``harmless``."""
        value = self.take(key)
        if value is not None and value not in harmless:
            self.lose(key, why)

    def untaken(self) -> list[str]:
        """Return the keys that nobody has taken, in the file's order."""
        return list(self._untaken)

    def leave(
        self, not_needed: Mapping[str, str], prefixes: Mapping[str, str], known: Iterable[str] = ()
    ) -> None:
        """Report the keys that were not taken: a note for a key that is not needed, a loss for an unknown one.

        Args:
            not_needed: The reasons, by key.
            prefixes: The reasons, by prefix of keys.
            known: Further keys to suggest for an unknown one.
        """
        names = [*not_needed, *known, *self.known]
        for key in self.untaken():
            why = not_needed.get(key) or next(
                (text for start, text in prefixes.items() if key.startswith(start)), None
            )
            value = self.take(key)
            if why is None:
                close = difflib.get_close_matches(key, names, n=1)
                self.lose(key, "unknown key" + (f" (did you mean {close[0]!r}?)" if close else ""))
            elif value not in (None, False):
                self.note(key, why)


def names(value: Any) -> list[str]:
    """Return ``"a, b"`` or ``["a", "b"]`` as a list."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [text for item in items if (text := str(item).strip())]


_TRAINS_ONLY = ("stage", "finetuning_type", "dataset", "do_train", "do_eval", "do_predict", "cutoff_len")


def job_of(given: dict[str, Any]) -> Job:
    """Return the job of a file.

    In LLaMA-Factory the command decides (``train``, ``export``, ``chat``), but the files for each command have keys of
    their own. A file that trains and then evaluates or predicts is a training file.
    """
    if is_version_1(given):
        peft = given.get("peft_config")
        exports = isinstance(peft, dict) and peft.get("export_dir") is not None
        if exports and not given.get("train_dataset"):
            return "export"
        return "train" if given.get("train_dataset") else "inference"
    if given.get("export_dir") is not None:
        return "export"
    if given.get("do_train"):
        return "train"
    if given.get("do_predict"):
        return "predict"
    if given.get("do_eval"):
        return "evaluate"
    if given.get("tokenized_path") is not None:
        return "preprocess"
    return "inference" if not any(given.get(key) is not None for key in _TRAINS_ONLY) else "train"
