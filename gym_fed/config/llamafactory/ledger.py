"""The books of one translation: every key of the file is taken, not needed, or without a counterpart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gym_fed.config.yaml.strict import KeyPath

_TELLS = "model_name_or_path"
_ALSO = ("stage", "finetuning_type", "dataset_dir", "template", "do_train", "cutoff_len")


def is_llamafactory(values: dict[str, Any]) -> bool:
    """Whether a YAML file is LLaMA-Factory's: it names a model and a stage (or another key of theirs alone)."""
    return _TELLS in values and any(key in values for key in _ALSO)


@dataclass
class Translation:
    """What became of a LLaMA-Factory file.

    Attributes:
        values: Our keys, ready to be validated.
        origins: For each key of ours that has one, the key of the file that it comes from.
        notes: Key of the file and what is said of it: nothing that is learnt changes by it.
        lost: Key of the file and why it has no counterpart, though the result depends on it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


class Ledger:
    """Hands out the file's keys one by one, so that at the end those nobody asked for are known.

    Args:
        given: The file's values.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.result = Translation()
        self._given = {key: value for key, value in given.items() if value is not None}
        self._rest = dict.fromkeys(given)
        self.asked: dict[str, None] = {}
        """Every key that was asked for: those that are known, beside the tables of ``keys``."""

    def take(self, key: str, default: Any = None) -> Any:
        """The file's value of ``key``, which counts as dealt with."""
        self._rest.pop(key, None)
        self.asked[key] = None
        return self._given.get(key, default)

    def has(self, key: str) -> bool:
        """Whether the file gives ``key`` a value."""
        self.asked[key] = None
        return key in self._given

    def put(self, path: str, value: Any, origin: str | None = None) -> None:
        """Set one of our keys, such as ``lora.r``; ``origin`` is the key of the file that says so."""
        keys = tuple(path.split("."))
        place = self.result.values
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        if origin is not None and self.has(origin):
            self.result.origins[keys] = origin

    def move(self, key: str, path: str, default: Any = None) -> None:
        """``put`` what ``take`` gives; nothing when the file does not say and there is no default."""
        value = self.take(key, default)
        if value is not None:
            self.put(path, value, key)

    def note(self, key: str, text: str) -> None:
        """Say of a key what does not change the result."""
        self.result.notes[key] = text

    def lose(self, key: str, why: str) -> None:
        """A key on which the result depends, and which cannot be translated."""
        self.result.lost[key] = why

    def lose_if(self, key: str, why: str, *, harmless: tuple[Any, ...] = (False,)) -> None:
        """``lose`` unless the key is absent or has a value that means nothing."""
        value = self.take(key)
        if value is not None and value not in harmless:
            self.lose(key, why)

    def rest(self) -> list[str]:
        """The keys that nobody has taken, in the file's order."""
        return list(self._rest)


def names(value: Any) -> list[str]:
    """``"a, b"`` or ``["a", "b"]`` as a list."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [text for item in items if (text := str(item).strip())]
