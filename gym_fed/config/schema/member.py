"""Schema keys whose value is a member's name, such as an aggregator, and entries that a member validates."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gym_quant.registry import Registry
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from gym_fed.config.schema.base import StrictModel
from gym_fed.core import aliases
from gym_fed.core.registries import Kind


@dataclass(frozen=True)
class MemberOf:
    """A marker for keys whose value is a member's name: ``Annotated[str, MemberOf(AGGREGATORS)]``.

    The JSON schema lists the members of this machine. A member is looked up by name without importing it.

    Attributes:
        kind: Registry of the members.
        also: Further accepted words, such as ``none``.
        fact: Attribute of the class that must be true, such as ``federates``; "" accepts every member. A member that is
            named is then imported. The JSON schema lists members of other packages unchecked, without importing them.
        others: Other kinds whose members are also accepted.
    """

    kind: Registry[Any]
    also: tuple[str, ...] = ()
    fact: str = ""
    others: tuple[Registry[Any], ...] = ()

    @property
    def kinds(self) -> tuple[Registry[Any], ...]:
        """The kinds whose members the key accepts."""
        return (self.kind, *self.others)

    def words(self) -> tuple[str, ...]:
        """Return every value that the key accepts."""
        names = (name for kind in self.kinds for name in kind.names())
        if not self.fact:
            return (*self.also, *names)
        own, able = set(self.kind.own()), set(self.kind.own_with(self.fact))
        return (*self.also, *(name for name in names if name not in own or name in able))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate_name, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.words())}

    def _validate_name(self, name: str) -> str:
        if name in self.also:
            return name
        if all(name not in kind for kind in self.kinds):
            kinds = " or ".join(kind.kind for kind in self.kinds)
            raise ValueError(f"unknown {kinds} {name!r}{self._near(name)} (known: {', '.join(self.words())})")
        if self.fact and not getattr(self.kind.type_of(name), self.fact):
            able = ", ".join((*self.also, *self.kind.own_with(self.fact)))
            raise ValueError(f"{self.kind.kind} {name!r} cannot be used for this key; use one of {able}")
        return name

    def _near(self, name: str) -> str:
        """Return a suggestion: gym-fed's name for it, or a similar name."""
        words = self.words()
        nearest = (aliases.nearest_member(kind.kind, name) for kind in self.kinds)
        by_alias = [near for near in nearest if near in words]
        anagrams = [word for word in words if sorted(word) == sorted(name)]
        close = by_alias or anagrams or difflib.get_close_matches(name, words, n=1)
        return f"; did you mean {close[0]!r}?" if close else ""


class ByMember(StrictModel):
    """The base class of entries that are validated by the ``Settings`` of the named member.

    ``list[Annotated[SerializeAsAny[GraderConfig], Chosen(GraderConfig)]]`` holds objects of those classes. Only members
    in use are imported. The JSON schema, which lists the keys of each, imports all of them, and omits unusable members
    of other packages.
    """

    member_key: ClassVar[str]
    """The field that names the member."""

    member_kind: ClassVar[Kind[Any]]

    @classmethod
    def settings_of(cls, name: str) -> type[ByMember]:
        """Return the class that validates an entry of the member ``name``.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` for a member of another package that cannot be used.
        """
        settings = cls.member_kind.type_of(name).Settings
        if not (isinstance(settings, type) and issubclass(settings, cls)):
            raise cls.member_kind.broken(
                name,
                f"{cls.member_kind.kind} {name!r}: its Settings is not a {cls.__name__}",
                "repair or remove the package that adds it",
            )
        return settings

    @classmethod
    def chosen(cls, entry: Any) -> type[ByMember]:
        """Return the class that validates an entry; this class if it names no member."""
        name = entry.get(cls.member_key) if isinstance(entry, Mapping) else None
        settings: type[ByMember] = cls
        if isinstance(name, str) and name in cls.member_kind:
            settings = cls.settings_of(name)
        return settings


@dataclass(frozen=True)
class Chosen:
    """A marker for values whose member determines their class, a subclass of ``base``."""

    base: type[ByMember]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._validate_entry, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        key, kind = self.base.member_key, self.base.member_kind
        entries = []
        for name in kind.usable(self.base.settings_of):
            settings = self.base.settings_of(name)
            entry = dict(handler.resolve_ref_schema(handler(settings.__pydantic_core_schema__)))
            entry["properties"] = {**entry["properties"], key: {"const": name, "type": "string"}}
            entries.append(entry)
        return {"oneOf": entries, "discriminator": {"propertyName": key}}

    def _validate_entry(self, entry: Any) -> Any:
        key, kind = self.base.member_key, self.base.member_kind
        if isinstance(entry, str):
            MemberOf(kind)._validate_name(entry)
            raise ValueError(
                f"{entry!r} is not a complete entry; write {{{key}: {entry}}}, with its other keys"
            )
        if isinstance(entry, Mapping):
            if entry.get(key) not in kind.names():  # only the name is refused
                entry = {key: entry[key]} if key in entry else {}
            return self.base.chosen(entry).model_validate(entry)
        if isinstance(entry, self.base) and not isinstance(entry, self.base.settings_of(getattr(entry, key))):
            raise ValueError(
                f"{type(entry).__name__} is not the settings class of {kind.kind} {getattr(entry, key)!r}"
            )
        return entry
