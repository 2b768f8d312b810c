"""Finds implementations by file name: one file, one class, one YAML value. Listing a registry imports nothing heavy."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from gym_fed.errors import ErrorCode, GymError

T = TypeVar("T")
_NEVER = {"base", "registry"}


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The files of a package, each with exactly one public subclass of ``base``.

    Attributes:
        package: Dotted name of the package; files called ``base``, ``registry`` or beginning with ``_`` do not count.
        key: The key of the YAML that names an entry.
    """

    package: str
    key: str

    def names(self) -> list[str]:
        """Every entry, in alphabetical order."""
        folder = Path(__file__).parents[2].joinpath(*self.package.split("."))
        modules = pkgutil.iter_modules([str(folder)])
        return sorted(m.name for m in modules if m.name not in _NEVER and not m.name.startswith("_"))

    def get(self, name: str, base: Any) -> T:
        """A new instance of the class in ``NAME.py``.

        Raises:
            GymError: ``CONFIG_INVALID`` when there is none.
        """
        instance: T = self.type_of(name, base)()
        return instance

    def type_of(self, name: str, base: Any) -> Any:
        """The class in ``NAME.py``, for those whose constructor takes settings; see ``get`` for the errors."""
        if name not in self.names():
            known = ", ".join(self.names())
            raise GymError(ErrorCode.CONFIG_INVALID, f"{self.key}: {name!r} is unknown", f"one of {known}")
        module = importlib.import_module(f"{self.package}.{name}")
        found: list[Any] = [
            value
            for key, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
            and not key.startswith("_")
        ]
        if len(found) != 1:
            raise TypeError(f"{module.__file__} must hold exactly one {base.__name__}, found {len(found)}")
        return found[0]
